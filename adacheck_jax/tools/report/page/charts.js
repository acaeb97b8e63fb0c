// Charts over the steps: one range of steps and one cursor for all of them.
const VIEW = { low: 0, high: 1, row: -1 };
const CHARTS = [];
const LEFT = 52, RIGHT = 10;
const FIRST = PLACED.length ? STEPS.step[PLACED[0]] : 0;
const LAST = PLACED.length ? STEPS.step[PLACED[PLACED.length - 1]] : 1;

function scale(width) {
  const span = VIEW.high - VIEW.low;
  const inner = Math.max(width - LEFT - RIGHT, 10);
  return {
    x: (step) => LEFT + ((step - VIEW.low) / span) * inner,
    step: (x) => VIEW.low + ((x - LEFT) / inner) * span,
    pixels: inner / span,
    inner,
  };
}
// Positions in PLACED of the first row at or after a step.
function place(step) {
  let low = 0, high = PLACED.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (STEPS.step[PLACED[middle]] < step) low = middle + 1; else high = middle;
  }
  return low;
}
const visible = () => PLACED.slice(place(VIEW.low), place(VIEW.high + 1e-9));

function nearest(step) {
  const after = Math.min(place(step), PLACED.length - 1);
  const before = Math.max(after - 1, 0);
  const isBefore = Math.abs(STEPS.step[PLACED[before]] - step) <= Math.abs(STEPS.step[PLACED[after]] - step);
  return PLACED[isBefore ? before : after];
}
function frame(width, height) {
  const made = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
  return made;
}
function stepAxis(made, map, y, width) {
  const count = Math.max(2, Math.min(10, Math.floor(width / 70)));
  const found = ticks(VIEW.low, VIEW.high, count).filter((each) => Number.isInteger(each));
  for (const step of found) {
    const x = map.x(step);
    made.append(svg("line", { class: "axis", x1: x, x2: x, y1: y, y2: y + 4 }));
    made.append(svg("text", { x, y: y + 16, "text-anchor": "middle" }, whole(step)));
  }
}
function valueAxis(made, values, y, width, label) {
  for (const value of values) {
    made.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    made.append(svg("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, label(value)));
  }
}
function cursorLine(made, y1, y2) {
  const line = svg("line", { class: "at", x1: -9, x2: -9, y1, y2 });
  made.append(line);
  return line;
}
function clickable(box) {
  const move = (event) => {
    if (event.type === "pointermove" && !(event.buttons & 1)) return;
    const area = box.getBoundingClientRect();
    if (PLACED.length) moveTo(nearest(scale(area.width).step(event.clientX - area.left)));
  };
  box.addEventListener("pointerdown", move);
  box.addEventListener("pointermove", move);
}

function timeline(box) {
  const bars = 168, strip = 20;
  let line = null, hand = null, map = null;
  function columns(width) {
    // Bars of their own while there is room for them, else sums over a few pixels.
    const rows = visible().filter((row) => isNumber(pick("new", row)));
    const isEach = map.pixels * smallestGap(rows) >= 2.5;
    const found = new Map();
    for (const row of rows) {
      const x = map.x(STEPS.step[row]);
      const key = isEach ? x : LEFT + Math.floor((x - LEFT) / 3) * 3 + 1.5;
      const sums = found.get(key) || { base: 0, delta: 0, other: 0, count: 0 };
      const kind = kindOf(row);
      sums[kind === "base" || kind === "delta" ? kind : "other"] += pick("new", row);
      sums.count += 1;
      found.set(key, sums);
    }
    const thick = isEach ? Math.max(1, Math.min(22, map.pixels * smallestGap(rows) - 1)) : 2.4;
    return { found, thick, isEach, most: Math.max(1, ...[...found.values()].map((each) => each.count)) };
  }
  function draw() {
    const width = box.clientWidth;
    map = scale(width);
    const made = frame(width, bars + strip + 26);
    const { found, thick, isEach, most } = columns(width);
    let top = 1;
    for (const each of found.values()) top = Math.max(top, each.base + each.delta + each.other);
    const y = (value) => bars - (value / top) * (bars - 10);
    if (found.size) valueAxis(made, ticks(0, top, 4), y, width, (value) => (value ? bytes(value).replace(/\.0+ /, " ").replace(/(\.\d)0 /, "$1 ") : "0"));
    for (const kind of ["base", "delta", "other"]) {
      let path = "";
      for (const [x, each] of found) {
        const under = kind === "base" ? each.delta : kind === "other" ? each.delta + each.base : 0;
        if (each[kind]) path += `M${(x - thick / 2).toFixed(1)} ${y(under).toFixed(1)}h${thick.toFixed(1)}V${y(under + each[kind]).toFixed(1)}h${(-thick).toFixed(1)}z`;
      }
      made.append(svg("path", { class: `k-${kind}`, d: path }));
    }
    made.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: bars, y2: bars }));
    marks(made, bars + strip / 2 + 1);
    made.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: bars + strip + 2, y2: bars + strip + 2 }));
    stepAxis(made, map, bars + strip + 2, width);
    line = cursorLine(made, 0, bars + strip + 2);
    hand = svg("path", { class: "hand", d: "" });
    made.append(hand);
    box.replaceChildren(made);
    $("timeline-lead").textContent = found.size
      ? `New bytes of each save${isEach ? "" : `, added up over ${most > 1 ? `up to ${most}` : "several"} saves a bar`}. Marks below the bars: what lies between and beside them.`
      : "No sizes are known, as in an object store. Marks show the steps.";
    cursor();
  }
  function marks(made, y) {
    const paths = {};
    const taken = {};
    for (const row of visible()) {
      const kind = kindOf(row);
      if ((kind === "base" || kind === "delta") && isNumber(pick("new", row))) continue;
      const x = map.x(STEPS.step[row]);
      const near = kind === "deferred" ? 2 : 6;
      if (taken[kind] !== undefined && x - taken[kind] < near) continue;
      taken[kind] = x;
      paths[kind] = (paths[kind] || "") + markPath(kind, Number(x.toFixed(1)), y);
    }
    for (const kind of DATA.kinds) if (paths[kind]) made.append(svg("path", { class: `k-${kind}`, d: paths[kind] }));
  }
  function cursor() {
    if (!line || VIEW.row < 0) return;
    const x = map.x(STEPS.step[VIEW.row]);
    const isInside = x >= LEFT - 1 && x <= box.clientWidth;
    line.setAttribute("x1", isInside ? x : -9);
    line.setAttribute("x2", isInside ? x : -9);
    hand.setAttribute("d", isInside ? `M${x - 5} 0h10l-5 7z` : "");
  }
  clickable(box);
  CHARTS.push({ draw, cursor });
}
function smallestGap(rows) {
  let gap = Infinity;
  for (let n = 1; n < rows.length; n += 1) {
    const found = STEPS.step[rows[n]] - STEPS.step[rows[n - 1]];
    if (found > 0 && found < gap) gap = found;
  }
  return Number.isFinite(gap) ? gap : Math.max(1, (VIEW.high - VIEW.low) / 8);
}

function lineChart(parent, title, values, format) {
  const height = 92;
  const output = el("output", {}, "");
  const note = el("span", { class: "soft" });
  const plane = el("div", { class: "cursor" });
  parent.append(el("figure", { class: "figure" }, el("figcaption", {}, el("span", {}, el("b", {}, title), " ", note), output), plane));
  let line = null, dot = null, map = null, y = null;
  function draw() {
    const width = plane.clientWidth;
    map = scale(width);
    const made = frame(width, height + 22);
    const rows = visible().filter((row) => isNumber(values[row]));
    const finite = rows.filter((row) => Number.isFinite(values[row]));
    const range = extent(finite.map((row) => values[row]));
    y = range.y(height);
    valueAxis(made, range.ticks, y, width, format);
    made.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }));
    stepAxis(made, map, height, width);
    made.append(svg("path", { class: "line", d: curve(finite) }));
    if (finite.length <= 3) for (const row of finite) made.append(svg("circle", { class: "mark", cx: map.x(STEPS.step[row]), cy: y(values[row]), r: 2.5 }));
    const wrong = rows.filter((row) => !Number.isFinite(values[row]));
    let last = -9, path = "";
    for (const row of wrong) {
      const x = map.x(STEPS.step[row]);
      if (x - last >= 4) { path += markPath("damaged", Number(x.toFixed(1)), 6); last = x; }
    }
    made.append(svg("path", { class: "bad-mark", d: path }));
    note.textContent = [range.isLog ? "log scale" : "", wrong.length ? `▲ ${wrong.length} not finite` : ""].filter(Boolean).join(", ");
    line = cursorLine(made, 0, height);
    dot = svg("circle", { class: "dot", cx: -9, cy: -9, r: 4 });
    made.append(dot);
    plane.replaceChildren(made);
    plane.setAttribute("role", "img");
    plane.setAttribute("aria-label", finite.length
      ? `${title}: ${short(values[finite[0]])} at step ${STEPS.step[finite[0]]}, ${short(values[finite[finite.length - 1]])} at step ${STEPS.step[finite[finite.length - 1]]}`
      : `${title}: no finite value`);
    cursor();
  }
  function curve(rows) {
    // Of the points in one column of pixels the extremes tell all that can be seen.
    if (rows.length < 2 * map.inner) return rows.map((row, n) => `${n ? "L" : "M"}${map.x(STEPS.step[row]).toFixed(1)} ${y(values[row]).toFixed(1)}`).join("");
    const points = [];
    let column = null;
    for (const row of rows) {
      const x = Math.round(map.x(STEPS.step[row]));
      const value = values[row];
      if (!column || column.x !== x) { column = { x, low: value, high: value, last: value }; points.push(column); }
      column.low = Math.min(column.low, value); column.high = Math.max(column.high, value); column.last = value;
    }
    return points.map((each, n) => `${n ? "L" : "M"}${each.x} ${y(each.low).toFixed(1)}V${y(each.high).toFixed(1)}V${y(each.last).toFixed(1)}`).join("");
  }
  function cursor() {
    if (!line || VIEW.row < 0) return;
    const value = values[VIEW.row];
    const x = map.x(STEPS.step[VIEW.row]);
    const isInside = x >= LEFT - 1 && x <= plane.clientWidth;
    line.setAttribute("x1", isInside ? x : -9);
    line.setAttribute("x2", isInside ? x : -9);
    const isShown = isInside && isNumber(value) && Number.isFinite(value);
    dot.setAttribute("cx", isShown ? x : -9);
    dot.setAttribute("cy", isShown ? y(value) : -9);
    output.textContent = format(value);
    output.className = isNumber(value) && !Number.isFinite(value) ? "bad" : "";
  }
  clickable(plane);
  CHARTS.push({ draw, cursor });
}
function extent(values) {
  if (!values.length) return { y: (height) => () => height, ticks: [], isLog: false };
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  const middle = [...values].sort((a, b) => a - b)[values.length >> 1];
  if (low > 0 && high / middle > 25) {
    const a = Math.log10(low), b = Math.log10(high);
    const powers = ticks(Math.floor(a), Math.ceil(b), 3).filter(Number.isInteger).map((each) => 10 ** each).filter((each) => each >= low * 0.99 && each <= high * 1.01);
    return { isLog: true, ticks: powers.length > 1 ? powers : [low, high], y: (height) => (value) => height - 4 - ((Math.log10(value) - a) / (b - a || 1)) * (height - 14) };
  }
  if (low > 0 && low < 0.4 * high) low = 0;
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
  const found = ticks(low, high, 3);
  return { isLog: false, ticks: found, y: (height) => (value) => height - 4 - ((value - low) / (high - low)) * (height - 14) };
}
