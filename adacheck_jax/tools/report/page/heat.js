// Change of each leaf at each step.
const ROLES = ["params", "optimizer state", "record", "other"];
const ROW = 14, HEADING = 22, FEW_LEAVES = 40;

function unpacked(text, rows) {
  const flat = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const columns = rows ? flat.length / rows : 0;
  return (row, column) => {
    const found = flat[row * columns + column];
    return found === 255 ? null : found / 254;
  };
}
function colour(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((n) => parseInt(text.slice(n, n + 2), 16));
}
function ramp() {
  const stops = ["--heat0", "--heat1", "--heat2", "--heat3"].map(colour);
  return (part) => {
    const at = Math.min(Math.max(part, 0), 1) * (stops.length - 1);
    const n = Math.min(Math.floor(at), stops.length - 2);
    return `rgb(${stops[n].map((each, k) => Math.round(each + (stops[n + 1][k] - each) * (at - n))).join(",")})`;
  };
}

function heatMap() {
  const changes = DATA.changes;
  const box = $("heat");
  if (!changes || !changes.paths.length || STEPS.changed.every((each) => each === null)) {
    $("heat-lead").textContent = changes && changes.paths.length
      ? "One recorded step: there is nothing before it to compare it with."
      : "No step can be restored, so no leaf is known.";
    return;
  }
  const share = unpacked(changes.shares, changes.paths.length);
  const norms = changes.norms.map(numbers);
  const positive = norms.flat().filter((each) => isNumber(each) && Number.isFinite(each) && each > 0);
  const hasNorms = positive.length > 0;
  const [lowest, highest] = hasNorms ? bounds(positive) : [0, 1];
  let isNorm = hasNorms, isAll = changes.paths.length <= FEW_LEAVES, chosen = 0, map = null;
  const list = el("ol", { "aria-hidden": "true" });
  const canvas = el("canvas", { role: "img" });
  const overlay = svg("svg", { "aria-hidden": "true" });
  const plane = el("div", { class: "plane cursor", tabindex: "0", role: "group", "aria-label": "Change of each leaf; arrow keys choose a leaf and a step", "aria-describedby": "heat-status" }, canvas, overlay);
  const line = svg("line", { class: "at", x1: -9, x2: -9, y1: 0, y2: 0 });
  const here = svg("rect", { fill: "none", stroke: "var(--cursor)", x: -99, y: 0, width: 0, height: ROW });
  overlay.append(line, here);
  box.append(list, plane);

  // A heading for each role, then its leaves; each with its place from the top.
  let lines = [];
  function arrange() {
    lines = [];
    let top = 0;
    const shown = new Set(changes.paths.map((_, n) => n));
    if (!isAll) {
      const order = [...shown].sort((a, b) => changes.sizes[b] - changes.sizes[a] || a - b);
      order.slice(FEW_LEAVES).forEach((each) => shown.delete(each));
    }
    for (const role of ROLES) {
      const rows = changes.paths.map((_, n) => n).filter((n) => changes.roles[n] === role && shown.has(n));
      if (!rows.length) continue;
      lines.push({ role, top });
      top += HEADING;
      const start = common(rows.map((n) => changes.paths[n]));
      for (const row of rows) { lines.push({ row, top, label: changes.paths[row].slice(start) }); top += ROW; }
    }
    lines.height = top;
    if (!lines.some((each) => each.row === chosen)) chosen = lines.find((each) => each.row !== undefined).row;
  }
  function cell(row, column) {
    return isNorm ? norms[row][column] : share(row, column);
  }
  const columns = () => (isNorm ? changes.norm_steps.map((step, n, every) => {
    const before = n ? every[n - 1] : step - 1, after = n < every.length - 1 ? every[n + 1] : step + 1;
    return [step - Math.min((step - before) / 2, 20), step + Math.min((after - step) / 2, 20)];
  }) : changes.columns.map(([first, last], n, every) => {
    const after = n < every.length - 1 ? every[n + 1][0] : last + 1;
    return [first - 0.5, Math.min(last + (after - last) / 2, last + 20)];
  }));
  function position(value) {
    if (!isNorm) return value;
    if (value === 0) return -1;
    return (Math.log10(value) - Math.log10(lowest)) / (Math.log10(highest) - Math.log10(lowest) || 1);
  }
  function draw() {
    const width = plane.clientWidth;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const inner = Math.max(width - 2, 10), span = VIEW.high - VIEW.low;
    map = { x: (step) => ((step - VIEW.low) / span) * inner + 1, step: (x) => VIEW.low + ((x - 1) / inner) * span };
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round((lines.height + 20) * ratio);
    canvas.style.height = `${lines.height + 20}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, lines.height + 20);
    const shade = ramp();
    const bad = `rgb(${colour("--bad").join(",")})`, none = `rgb(${colour("--heat-none").join(",")})`;
    const tones = new Map();
    columns().forEach(([first, last], column) => {
      if (last < VIEW.low || first > VIEW.high) return;
      const x = Math.max(map.x(first), 0);
      const thick = Math.max(Math.min(map.x(last), width) - x, 1);
      const gap = thick > 5 ? 1 : 0;
      for (const each of lines) {
        if (each.row === undefined) continue;
        const value = cell(each.row, column);
        if (value === null || value === undefined) continue;
        let tone = none;
        if (Number.isNaN(value)) tone = bad;
        else {
          const part = position(value);
          if (part >= 0 || value !== 0) {
            const key = Math.round(Math.min(Math.max(part, 0), 1) * 120);
            if (!tones.has(key)) tones.set(key, shade(key / 120));
            tone = tones.get(key);
          }
        }
        pen.fillStyle = tone;
        pen.fillRect(x, each.top, thick - gap, ROW - 1);
      }
    });
    overlay.setAttribute("viewBox", `0 0 ${width} ${lines.height + 20}`);
    overlay.querySelectorAll(".tick").forEach((each) => each.remove());
    for (const step of ticks(VIEW.low, VIEW.high, Math.max(2, Math.min(10, Math.floor(width / 70)))).filter(Number.isInteger)) {
      const mark = svg("text", { class: "tick", x: Math.min(Math.max(map.x(step), 8), width - 8), y: lines.height + 15, "text-anchor": "middle" }, whole(step));
      overlay.append(mark);
    }
    cursor();
  }
  function labels() {
    const most = Math.floor((list.clientWidth - 10) / (list.clientWidth < 150 ? 6.1 : 6.7));
    list.replaceChildren(...lines.map((each) => (each.row === undefined
      ? el("li", { class: "role" }, each.role)
      : el("li", { title: changes.paths[each.row], "data-row": each.row }, each.label.length > most ? `…${each.label.slice(each.label.length - most + 1)}` : each.label))));
  }
  function columnAt(step) {
    const every = isNorm ? changes.norm_steps : null;
    if (!every) return changes.columns.findIndex(([first, last]) => first <= step && step <= last);
    return every.indexOf(step);
  }
  function cursor() {
    if (!map || VIEW.row < 0) return;
    const step = STEPS.step[VIEW.row];
    const x = map.x(step);
    const isInside = step >= VIEW.low && step <= VIEW.high;
    for (const end of ["x1", "x2"]) line.setAttribute(end, isInside ? x : -9);
    line.setAttribute("y2", lines.height);
    const at = lines.find((each) => each.row === chosen);
    const column = columnAt(step);
    const spot = column >= 0 ? columns()[column] : null;
    here.setAttribute("x", isInside && spot ? map.x(spot[0]) - 1 : -99);
    here.setAttribute("y", at.top - 1);
    here.setAttribute("width", spot ? Math.max(map.x(spot[1]) - map.x(spot[0]), 3) + 1 : 0);
    list.querySelectorAll("li").forEach((each) => each.classList.toggle("on", Number(each.dataset.row) === chosen && each.dataset.row !== undefined));
    $("heat-status").textContent = `Step ${whole(step)}, ${changes.paths[chosen]}: ${said(column)}`;
  }
  function said(column) {
    const value = column < 0 ? null : cell(chosen, column);
    if (value === null || value === undefined) return column < 0 && isNorm ? "this step was not restored" : "no step before it tells";
    if (!isNorm) {
      const [first, last] = changes.columns[column];
      if (first === last) return value ? "changed" : "did not change";
      return `changed at ${percent(value)} of the steps ${whole(first)} to ${whole(last)}`;
    }
    if (value === 0) return "did not change";
    if (Number.isNaN(value)) return "not finite";
    return Number.isFinite(value) ? `changed by ${short(value)} of its norm` : "changed from zero";
  }
  function legend() {
    const shown = el("canvas", { width: 320, height: 20, "aria-hidden": "true" });
    const pen = shown.getContext("2d");
    const shade = ramp();
    for (let x = 0; x < 320; x += 2) { pen.fillStyle = shade(x / 320); pen.fillRect(x, 0, 2, 20); }
    const cellOf = (tone, text) => {
      const swatch = el("span", { class: "cell" });
      swatch.style.background = `var(${tone})`;
      return el("span", { class: "key" }, swatch, text);
    };
    $("heat-ramp").replaceChildren(...(isNorm
      ? [`≤ ${short(lowest)}`, shown, `≥ ${short(highest)} of the leaf's norm, log scale`, cellOf("--heat-none", "did not change"), norms.flat().some(Number.isNaN) ? cellOf("--bad", "not finite") : ""]
      : ["never", shown, "at every step of the column"]));
  }
  function tools() {
    const kinds = hasNorms ? [["Relative norm", true], ["Changed or not", false]] : [];
    const buttons = kinds.map(([text, kind]) => {
      const made = el("button", { type: "button", "aria-pressed": String(kind === isNorm) }, text);
      made.addEventListener("click", () => { isNorm = kind; all(); });
      return made;
    });
    if (changes.paths.length > FEW_LEAVES) {
      const made = el("button", { type: "button" }, isAll ? `Largest ${FEW_LEAVES} leaves` : `All ${changes.paths.length} leaves`);
      made.addEventListener("click", () => { isAll = !isAll; all(); });
      buttons.push(made);
    }
    $("heat-tools").replaceChildren(...buttons);
    const perColumn = changes.columns.some(([a, b]) => a !== b);
    const few = isAll ? changes.left_out : changes.left_out + changes.paths.length - FEW_LEAVES;
    $("heat-lead").textContent = (isNorm
      ? "Norm of each leaf's change since the recorded step before, relative to the leaf."
      : `Fingerprints tell which leaves changed since the recorded step before${perColumn ? ", here as a share of the steps in each column" : ""}; no array was read for it.`)
      + (few ? ` ${counted(few, "smaller leaf is", "smaller leaves are")} not shown.` : "");
    canvas.setAttribute("aria-label", `${isNorm ? "Relative change" : "Change"} of ${counted(lines.filter((each) => each.row !== undefined).length, "leaf", "leaves")} over the steps`);
  }
  function all() { arrange(); tools(); labels(); legend(); draw(); }
  plane.addEventListener("pointerdown", (event) => {
    const area = plane.getBoundingClientRect();
    const at = lines.find((each) => each.row !== undefined && event.clientY - area.top >= each.top && event.clientY - area.top < each.top + ROW);
    if (at) chosen = at.row;
    moveTo(nearest(map.step(event.clientX - area.left)));
  });
  plane.addEventListener("keydown", (event) => {
    const rows = lines.filter((each) => each.row !== undefined);
    const way = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    event.stopPropagation();
    const n = rows.findIndex((each) => each.row === chosen) + way;
    chosen = rows[Math.min(Math.max(n, 0), rows.length - 1)].row;
    cursor();
  });
  plane.addEventListener("keydown", onKey);
  arrange();
  tools();
  CHARTS.push({ draw: () => { labels(); legend(); draw(); }, cursor });
}
function bounds(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (part) => sorted[Math.min(Math.floor(part * sorted.length), sorted.length - 1)];
  return [at(0.02), at(0.995)];
}
// Length of the beginning that all paths have in common, up to a slash.
function common(paths) {
  if (paths.length < 2) return 0;
  let n = 0;
  while (n < paths[0].length && paths.every((each) => each[n] === paths[0][n])) n += 1;
  return paths[0].lastIndexOf("/", n - 1) + 1;
}
