"use strict";
// Values of the report, and the words and marks that all parts of the page use.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((each) => each !== null && each !== undefined));
  return made;
}
function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
// JSON has no NaN and no infinity: they come as texts.
const num = (value) => (typeof value === "string" ? Number(value) : value);
const numbers = (values) => (values ? values.map(num) : null);
const isNumber = (value) => typeof value === "number";

function bytes(count) {
  if (!isNumber(count)) return "?";
  if (count < 1000) return `${count} bytes`;
  const units = ["kB", "MB", "GB", "TB", "PB"];
  let n = -1;
  let size = count;
  while (size >= 999.95 && n < units.length - 1) { size /= 1000; n += 1; }
  return `${size.toFixed(size < 10 ? 2 : 1)} ${units[n]}`;
}
const whole = (count) => (count === 0 ? 0 : count).toLocaleString("en-US");
const counted = (count, one, several) => `${whole(count)} ${count === 1 ? one : several}`;
const percent = (part) => (part > 0 && part < 0.001 ? "< 0.1%" : `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`);
function short(value) {
  if (!isNumber(value)) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) {
    const [digits, power] = value.toExponential(2).split("e");
    return `${digits.replace("-", "−")}e${power.replace("+", "").replace("-", "−")}`;
  }
  return String(Number(value.toPrecision(4))).replace("-", "−");
}
function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} d`;
}
const moment = (ms) => (isNumber(ms) ? new Date(ms).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "–");

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) found.push(n * step);
  return found;
}

const STEPS = {};
for (const [key, value] of Object.entries(DATA.steps)) STEPS[key] = value;
for (const key of ["wait", "gradient", "update", "params", "rate"]) STEPS[key] = numbers(STEPS[key]);
const METRICS = Object.entries(DATA.steps.metrics).map(([name, values]) => [name, numbers(values)]);
const COUNT = STEPS.step.length;
// Rows without a number have no place on an axis; they are in the table alone.
const PLACED = [];
for (let row = 0; row < COUNT; row += 1) if (STEPS.step[row] !== null) PLACED.push(row);
const kindOf = (row) => DATA.kinds[STEPS.kind[row]];
const pick = (column, row) => (STEPS[column] ? STEPS[column][row] : null);

const WORDS = {
  base: ["base", "bases", "the full state"],
  delta: ["delta", "deltas", "what reproduces the step from the one before"],
  deferred: ["deferred step", "deferred steps", "saved with a later step"],
  stock: ["stock step", "stock steps", "saved by stock Orbax; nothing here can verify it"],
  foreign: ["foreign directory", "foreign directories", "has a step's name and holds no checkpoint"],
  damaged: ["damaged step", "damaged steps", "cannot be restored, or damage was found"],
};
// The outline of a kind's mark around a point, so that no kind is told by colour alone.
function markPath(kind, x, y) {
  if (kind === "damaged") return `M${x - 5} ${y + 4.5}h10L${x} ${y - 4.5}z`;
  if (kind === "stock") return `M${x} ${y - 5}l4.5 5l-4.5 5l-4.5 -5z`;
  if (kind === "foreign") return `M${x - 3.5} ${y - 3.5}l7 7m0 -7l-7 7`;
  if (kind === "deferred") return `M${x} ${y - 4}v8`;
  return `M${x - 4} ${y - 5}h8v10h-8z`;
}
const WAYS = {
  replayed: ["replayed", "computed by the update at a restore: no delta has it"],
  unchanged: ["unchanged", "the bits of the step before, or of an earlier base (linked)"],
  equal: ["equal", "shares the data of another leaf in a base"],
  differences: ["differences", "stored as compressed differences of bits"],
  recorded: ["recorded", "what the update consumed, in every delta"],
  stored: ["stored", "written as it is, in bases and deltas"],
};
