// The header, the cursor, and what ties the parts together.
function tiles() {
  const { saved, recorded, newest, disk } = DATA.summary;
  const savings = DATA.savings;
  const { damaged_count: damaged, structure_count: seen } = DATA.verification;
  const newestRow = PLACED.length ? PLACED[PLACED.length - 1] : null;
  const lastSaved = STEPS.at ? STEPS.at.reduce((best, each) => (isNumber(each) && each > best ? each : best), 0) : 0;
  const tile = (title, shown, detail, tone) => el("div", {}, el("dt", {}, title), el("dd", { class: `value ${tone || ""}` }, shown), el("dd", { class: "detail" }, detail));
  $("tiles").append(
    tile("Recorded steps", whole(recorded), `${counted(saved, "step directory", "step directories")}`),
    tile("Newest step", newestRow === null ? "–" : whole(newest), lastSaved ? `saved ${moment(lastSaved)}` : "no date is known"),
    tile("On disk", isNumber(disk) ? bytes(disk) : "unknown", savings && isNumber(disk) && savings.full_bytes > disk ? `${(savings.full_bytes / disk).toFixed(1)}× less than each step in full` : isNumber(disk) ? "all files under the root" : "an object store tells no sizes"),
    tile("Verification", damaged ? `✕ ${whole(damaged)} damaged` : seen ? "✓ no damage" : "not checked", seen ? `structure of ${counted(seen, "step", "steps")}; no array was read` : "structure was not looked at", damaged ? "bad" : seen ? "good" : ""),
  );
  $("made").append(...(DATA.watch ? [el("span", { class: "live", "aria-hidden": "true" }), `Watched: this page loads itself again every ${DATA.watch} seconds. Made `] : ["Made "]), moment(Date.parse(DATA.made_at)), DATA.update ? `. Deltas: ${DATA.update}.` : ".");
}
function verification() {
  const said = DATA.verification;
  const kinds = { full: "every element was replayed and compared", sample: "small leaves whole, and blocks of the others", identity: "the saved arrays are those that the update returned", stored: "nothing is replayed", "not checked": "not compared with the state" };
  const checks = Object.entries(said.at_save).map(([kind, count]) => el("li", {}, el("b", {}, `${counted(count, "delta", "deltas")}: ${kind}`), kinds[kind] ? `, ${kinds[kind]}` : ""));
  const damaged = [];
  for (let row = 0; row < COUNT; row += 1) if (DATA.steps.error[row]) damaged.push(row);
  const found = damaged.slice(0, 20).map((row) => el("li", { class: "bad" }, STEPS.step[row] === null ? "?" : el("a", { href: `#step-${STEPS.step[row]}` }, `step ${whole(STEPS.step[row])}`), ` ${DATA.steps.error[row]}`));
  if (damaged.length > 20) found.push(el("li", {}, `and ${whole(damaged.length - 20)} more`));
  const left = said.leftovers.slice(0, 10).map(([path, why]) => el("li", {}, el("code", {}, path), ` ${why}`));
  const list = (title, items, none) => el("div", {}, el("h3", {}, title), items.length ? el("ul", {}, ...items) : el("p", { class: "lead" }, none));
  const now = said.structure_count ? `Structure of ${counted(said.structure_count, "saved step", "saved steps")}: manifests, update programs, and that every file and chunk is there.` : "";
  $("verification").append(el("div", { class: "checks" },
    list("Found now", found, said.structure_count ? `No damage. ${now}` : "Nothing was looked at."),
    list("When the deltas were saved", checks, "There are no deltas."),
    list("Not looked at", said.not_looked_at.map((each) => el("li", {}, each)), "Nothing was left out."),
    list("Beside the steps", left, "No leftovers."),
  ));
}
function legend() {
  const counts = {};
  for (let row = 0; row < COUNT; row += 1) counts[kindOf(row)] = (counts[kindOf(row)] || 0) + 1;
  $("timeline-legend").append(...DATA.kinds.filter((kind) => counts[kind]).map((kind) => {
    const made = svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" });
    made.append(svg("path", { class: `k-${kind}`, d: markPath(kind, 6, 6) }));
    return el("li", { title: WORDS[kind][2] }, made, el("span", {}, `${WORDS[kind][counts[kind] === 1 ? 0 : 1]} `, el("span", { class: "n" }, whole(counts[kind]))));
  }));
}
function series() {
  const charts = [["Gradient norm", STEPS.gradient, short], ["Update norm", STEPS.update, short], ["Learning rate", STEPS.rate, short], ...METRICS.slice(0, 12).map(([name, values]) => [name, values, short]), ["Time between saves", STEPS.wait, seconds]]
    .filter(([, values]) => values && values.some((each) => each !== null));
  const notes = [];
  if (DATA.norms_note) notes.push(DATA.norms_note);
  else if (DATA.restored && !STEPS.gradient) notes.push("No gradients: the run was saved without a Recorder.");
  if (!METRICS.length) notes.push("No metrics were given with the saves.");
  if (METRICS.length > 12) notes.push(`12 of ${METRICS.length} metrics.`);
  if (!charts.length) notes.push("There is nothing to draw yet.");
  $("series-lead").textContent = notes.join(" ") || "What the Recorder recorded, and what was given with the saves.";
  for (const [title, values, format] of charts) lineChart($("series"), title, values, format);
}
function facts() {
  const row = VIEW.row, box = $("facts"), step = STEPS.step[row];
  $("facts-title").textContent = `Step ${whole(step)}`;
  const known = [];
  const add = (title, text) => { if (text !== null && text !== undefined && text !== "" && text !== "–") known.push([title, text]); };
  add("kind", WORDS[kindOf(row)][0]);
  add("saved", isNumber(pick("at", row)) ? moment(pick("at", row)).replace(" UTC", "") : "");
  add("since the save before", seconds(pick("wait", row)));
  if (DATA.steps.held[row] !== undefined) add(kindOf(row) === "deferred" ? "saved with step" : "held by step", whole(DATA.steps.held[row]));
  add("builds on", isNumber(pick("parent", row)) ? whole(pick("parent", row)) : "");
  add("deltas after its base", isNumber(pick("depth", row)) ? whole(pick("depth", row)) : "");
  if (DATA.steps.recorded[row]) add("deferred steps in it", whole(DATA.steps.recorded[row]));
  add("new bytes", isNumber(pick("new", row)) ? bytes(pick("new", row)) : "");
  add("files in its directory", isNumber(pick("size", row)) ? bytes(pick("size", row)) : "");
  add("checked", pick("check", row));
  add("leaves changed", isNumber(pick("changed", row)) ? `${whole(pick("changed", row))} of ${whole(DATA.summary.leaves)}` : "");
  add("gradient norm", short(pick("gradient", row)));
  add("update norm", short(pick("update", row)));
  const update = pick("update", row), params = pick("params", row);
  if (isNumber(update) && isNumber(params) && params) add("update / params", short(update / params));
  add("learning rate", short(pick("rate", row)));
  for (const [name, values] of METRICS.slice(0, 12)) add(name, short(values[row]));
  const wrong = DATA.steps.error[row];
  box.replaceChildren(...known.map(([title, text]) => el("div", {}, el("dt", {}, title), el("dd", {}, text))), ...(wrong ? [el("div", { class: "wide bad" }, el("dt", {}, "damage"), el("dd", {}, wrong))] : []));
  const slider = $("timeline");
  slider.setAttribute("aria-valuenow", PLACED.indexOf(row) + 1);
  slider.setAttribute("aria-valuetext", `Step ${step}: ${known.map(([title, text]) => `${title} ${text}`).join(", ")}${wrong ? `, damaged: ${wrong}` : ""}`);
}
function moveTo(row) {
  if (row === VIEW.row || row === undefined) return;
  VIEW.row = row;
  const step = STEPS.step[row];
  if (step < VIEW.low || step > VIEW.high) {
    const span = VIEW.high - VIEW.low;
    look(step - span / 2, step + span / 2);
  }
  for (const chart of CHARTS) chart.cursor();
  facts();
  markRow();
  $("go-back").disabled = row === PLACED[0];
  $("go-on").disabled = row === PLACED[PLACED.length - 1];
  // The newest step has no anchor of its own, so that a page that loads itself again follows the run.
  const anchor = row === PLACED[PLACED.length - 1] ? "" : `#step-${step}`;
  if (location.hash !== anchor) history.replaceState(null, "", anchor || location.pathname + location.search);
}
function move(by) {
  const n = PLACED.indexOf(VIEW.row) + by;
  moveTo(PLACED[Math.min(Math.max(n, 0), PLACED.length - 1)]);
}
function look(low, high) {
  const pad = Math.max((LAST - FIRST) * 0.012, 0.6);
  const span = Math.min(Math.max(high - low, 4), LAST - FIRST + 2 * pad);
  const start = Math.min(Math.max(low, FIRST - pad), LAST + pad - span);
  Object.assign(VIEW, { low: start, high: start + span });
  $("zoom-all").disabled = $("zoom-out").disabled = span >= LAST - FIRST + 2 * pad - 1e-9;
  $("zoom-in").disabled = span <= 4;
  drawAll();
}
function zoom(by) {
  const step = STEPS.step[VIEW.row];
  const span = (VIEW.high - VIEW.low) * by;
  look(step - span / 2, step + span / 2);
}
const wholeRun = () => look(-Infinity, Infinity);
function drawAll() { for (const chart of CHARTS) chart.draw(); }
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !PLACED.length) return;
  const actions = {
    ArrowLeft: () => move(-1), ArrowRight: () => move(1), ArrowDown: () => move(-1), ArrowUp: () => move(1),
    PageUp: () => move(10), PageDown: () => move(-10), Home: () => move(-COUNT), End: () => move(COUNT),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: wholeRun,
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}
function toHash() {
  const found = /^#step-(\d+)$/.exec(location.hash);
  if (!found) return false;
  const step = Number(found[1]);
  const row = PLACED[place(step)];
  if (row === undefined || STEPS.step[row] !== step) return false;
  moveTo(row);
  return true;
}

// Load the page again, and leave the range, the step and the focus as they are.
function again() {
  const { low, high } = VIEW;
  const isWhole = $("zoom-all").disabled;
  history.replaceState({ low, high, isWhole, focus: document.activeElement && document.activeElement.id }, "");
  location.reload();
}
function resume() {
  const before = history.state;
  if (!DATA.watch || !before) return;
  if (!before.isWhole && PLACED.length) look(before.low, before.high);
  if (before.focus && $(before.focus)) $(before.focus).focus({ preventScroll: true });
}

function start() {
  tiles();
  legend();
  verification();
  bytesSection();
  if (PLACED.length) {
    timeline($("timeline"));
    series();
    heatMap();
    wholeRun();
    if (!toHash()) moveTo(PLACED[PLACED.length - 1]);
  }
  choose("");
  tableTools();
  showRow(false);
  const slider = $("timeline");
  slider.setAttribute("aria-valuemin", 1);
  slider.setAttribute("aria-valuemax", Math.max(PLACED.length, 1));
  slider.addEventListener("keydown", onKey);
  const buttons = { "go-back": () => move(-1), "go-on": () => move(1), "zoom-in": () => zoom(0.5), "zoom-out": () => zoom(2), "zoom-all": wholeRun };
  for (const [id, action] of Object.entries(buttons)) $(id).addEventListener("click", action);
  window.addEventListener("hashchange", toHash);
  let width = document.documentElement.clientWidth;
  window.addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    requestAnimationFrame(drawAll);
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", drawAll);
  resume();
  if (DATA.watch) setTimeout(again, DATA.watch * 1000);
  document.documentElement.dataset.drawnMs = Math.round(performance.now());
}
start();
