// The table of steps, a page at a time; bytes by leaf.
const PAGE = 50;
const TABLE = { rows: [], page: 0, kind: "" };

function cells() {
  const has = (column) => STEPS[column] && STEPS[column].some((each) => each !== null);
  const all = [
    ["kind", "text", (row) => kindOf(row), true],
    ["saved at (UTC)", "", (row) => (isNumber(pick("at", row)) ? moment(pick("at", row)).replace(" UTC", "") : DATA.steps.held[row] !== undefined ? `in step ${whole(DATA.steps.held[row])}` : ""), true],
    ["new bytes", "", (row) => (isNumber(pick("new", row)) ? bytes(pick("new", row)) : ""), has("new")],
    ["on disk", "", (row) => (isNumber(pick("size", row)) ? bytes(pick("size", row)) : ""), has("size")],
    ["builds on", "", (row) => (isNumber(pick("parent", row)) ? whole(pick("parent", row)) : ""), has("parent")],
    ["deltas", "", (row) => (isNumber(pick("depth", row)) ? whole(pick("depth", row)) : ""), has("depth")],
    ["checked", "text", (row) => pick("check", row) || "", has("check")],
    ["leaves changed", "", (row) => (isNumber(pick("changed", row)) ? whole(pick("changed", row)) : ""), has("changed")],
    ["gradient", "", (row) => value("gradient", row), has("gradient")],
    ["update", "", (row) => value("update", row), has("update")],
    ["learning rate", "", (row) => value("rate", row), has("rate")],
    ...METRICS.slice(0, 4).map(([name, values]) => [name, "", (row) => (values[row] === null ? "" : short(values[row])), true]),
    ["damage", "prose bad", (row) => DATA.steps.error[row] || "", Object.keys(DATA.steps.error).length > 0],
  ];
  return all.filter((each) => each[3]);
}
const value = (column, row) => (isNumber(pick(column, row)) ? short(pick(column, row)) : "");

function fillTable() {
  const columns = cells();
  const from = TABLE.page * PAGE;
  const rows = TABLE.rows.slice(from, from + PAGE);
  const head = el("tr", {}, el("th", { scope: "col", class: "text" }, "step"), ...columns.map(([title, kind]) => el("th", { scope: "col", class: kind.startsWith("text") || kind.startsWith("prose") ? "text" : null }, title)));
  const body = rows.map((row) => {
    const step = STEPS.step[row];
    const name = step === null ? "?" : el("a", { href: `#step-${step}` }, whole(step));
    const made = el("tr", row === VIEW.row ? { "aria-current": "true" } : {}, el("th", { scope: "row", class: "text", title: itemOf(row) }, name));
    made.dataset.row = row;
    made.append(...columns.map(([, kind, text]) => el("td", kind ? { class: kind } : {}, text(row))));
    return made;
  });
  $("table").replaceChildren(el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
  const last = Math.max(Math.ceil(TABLE.rows.length / PAGE) - 1, 0);
  const button = (text, page, label) => {
    const made = el("button", { type: "button", "aria-label": label }, text);
    made.disabled = page < 0 || page > last || page === TABLE.page;
    made.addEventListener("click", () => { TABLE.page = page; fillTable(); });
    return made;
  };
  const said = rows.length ? `rows ${whole(from + 1)} to ${whole(from + rows.length)} of ${whole(TABLE.rows.length)}` : "no such step";
  $("pager").replaceChildren(button("«", 0, "First page"), button("‹", TABLE.page - 1, "Page before"), el("span", {}, said), button("›", TABLE.page + 1, "Next page"), button("»", last, "Last page"));
  $("pager").hidden = last === 0 && rows.length > 0;
}
const itemOf = (row) => (kindOf(row) === "deferred" ? "saved with a later step" : DATA.steps.item[row] || (DATA.steps.held[row] !== undefined ? "held by a later step's directory" : `${STEPS.step[row]}/${DATA.item}`));

function choose(kind) {
  TABLE.kind = kind;
  TABLE.rows = [];
  for (let row = COUNT - 1; row >= 0; row -= 1) if (!kind || kindOf(row) === kind) TABLE.rows.push(row);
  TABLE.page = 0;
}
function tableTools() {
  const kinds = DATA.kinds.filter((kind) => STEPS.kind.some((_, row) => kindOf(row) === kind));
  const select = el("select", { id: "kind" }, el("option", { value: "" }, "all kinds"), ...kinds.map((kind) => el("option", { value: kind }, WORDS[kind][1])));
  select.addEventListener("change", () => { choose(select.value); fillTable(); });
  const button = el("button", { type: "button" }, "Show the cursor's step");
  button.addEventListener("click", () => { select.value = ""; showRow(true); });
  $("table-tools").append(el("label", { for: "kind" }, "Show"), select, button);
}
// Turn to the page of the cursor's row.
function showRow(isScrolled) {
  if (TABLE.kind) choose("");
  const n = TABLE.rows.indexOf(VIEW.row);
  if (n < 0) return;
  TABLE.page = Math.floor(n / PAGE);
  fillTable();
  const found = $("table").querySelector('tr[aria-current="true"]');
  if (isScrolled && found) { found.scrollIntoView({ block: "center" }); found.querySelector("a")?.focus({ preventScroll: true }); }
}
function markRow() {
  for (const row of $("table").querySelectorAll("tbody tr")) {
    if (Number(row.dataset.row) === VIEW.row) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
  }
}

function stack(ways, whole_) {
  const box = el("div", { class: "stack", "aria-hidden": "true" });
  for (const [name, size] of ways) {
    if (!(size / whole_ >= 0.002)) continue; // its frame alone would be wider than it
    const part = el("span", { class: `w-${name}` });
    part.style.width = `${(100 * size) / whole_}%`;
    box.append(part);
  }
  return box;
}
function bytesSection() {
  const savings = DATA.savings;
  if (!savings) {
    $("bytes-lead").textContent = "No step can be restored, so it is not known what was kept in which way.";
    for (const id of ["leaves-title", "ways-table"]) $(id).hidden = true;
    return;
  }
  const ways = Object.entries(savings.train_state).map(([name, size]) => [name, size]);
  const disk = savings.disk_bytes;
  const most = Math.max(savings.full_bytes, disk || 0);
  const other = isNumber(savings.base_bytes) && isNumber(savings.delta_bytes) ? Math.max(disk - savings.base_bytes - savings.delta_bytes, 0) : 0;
  $("bytes-lead").textContent = `${counted(savings.step_count, "recorded step", "recorded steps")} of a state of ${bytes(savings.train_state_bytes)}`
    + (disk && savings.full_bytes > disk ? `: ${(savings.full_bytes / disk).toFixed(1)} times less on disk than all of them in full.` : ".");
  const row = (title, text, parts) => el("div", { class: "bar-row" }, el("p", {}, el("b", {}, title), el("span", {}, text)), stack(parts, most));
  const bars = [row("Each step in full, as stock Orbax keeps it", `${bytes(savings.full_bytes)} before compression`, ways)];
  if (isNumber(disk)) {
    const told = [[savings.base_bytes, "bases"], [savings.delta_bytes, "deltas"], [other > disk * 0.005 ? other : 0, "other files"]].filter(([size]) => size);
    bars.push(row("This root on disk", `${bytes(disk)}: ${told.map(([size, name]) => `${name} ${bytes(size)}`).join(", ")}`, [["stored", savings.base_bytes], ["recorded", savings.delta_bytes], ["other", other]]));
  } else bars.push(el("p", { class: "note" }, "The size of the root is not known: an object store tells sizes with the bytes alone."));
  $("bytes-bars").replaceChildren(...bars);
  const rows = Object.keys(WAYS).map((name) => [name, savings.train_state[name], savings.added[name]]).filter(([, own, added]) => own || added);
  const body = rows.map(([name, own, added]) => el("tr", {}, el("th", { scope: "row", class: "text" }, el("span", { class: `swatch w-${name}` }), WAYS[name][0]), el("td", {}, own ? bytes(own) : "–"), el("td", {}, own ? percent(own / savings.full_bytes) : "–"), el("td", {}, added ? bytes(added) : "–"), el("td", { class: "prose" }, WAYS[name][1])));
  const head = ["kept", "state", "share", "record", "meaning"].map((title, n) => el("th", { scope: "col", class: n === 0 || n === 4 ? "text" : null }, title));
  $("ways-table").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)));
  const zeros = savings.zero_bytes ? ` Of the stored bytes ${bytes(savings.zero_bytes)} were zeros that deltas left out.` : "";
  $("leaves-lead").textContent = `Bytes in memory before compression; the record is what the Recorder adds to the state.${zeros} The largest leaves first; the length of a bar is the leaf's size.`;
  leafBars(16);
}
function leafBars(count) {
  const order = DATA.leaves.rows.map((_, n) => n).sort((a, b) => DATA.leaves.rows[b][3] - DATA.leaves.rows[a][3] || a - b);
  const largest = DATA.leaves.rows[order[0]][3] || 1;
  const names = Object.keys(DATA.savings.train_state);
  $("leaves").replaceChildren(...order.slice(0, count).map((n) => {
    const [path, description, role, size, sizes] = DATA.leaves.rows[n];
    const all = sizes.reduce((a, b) => a + b, 0);
    const written = names.reduce((sum, name, k) => sum + (["differences", "recorded", "stored"].includes(name) ? sizes[k] : 0), 0);
    const bar = stack(names.map((name, k) => [name, sizes[k]]), all || 1);
    bar.style.width = `${Math.max((100 * size) / largest, 1.5)}%`;
    return el("li", {}, el("span", { class: "path" }, path, " ", el("small", {}, `${description}, ${role}`)), bar, el("span", { class: "end" }, `${bytes(size)}, ${percent(all ? written / all : 0)} stored`));
  }));
  const left = order.length - count;
  const more = $("leaves-more");
  more.hidden = left <= 0;
  more.textContent = `Show ${whole(Math.min(left, 100))} more of ${counted(order.length + DATA.leaves.left_out, "leaf", "leaves")}`;
  more.onclick = () => leafBars(count + 100);
}
