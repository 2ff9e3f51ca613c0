// Elements, numbers and colours.

const SVG = "http://www.w3.org/2000/svg";

// Text goes into the page only as text nodes, so a model's output can never become markup.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined && child !== ""));
  return node;
}

const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

function s(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const NUM_COLOURS = 12;
const colour = number => `var(--c${number % NUM_COLOURS})`;

function colourOfWord(word) {
  let sum = 7;
  for (const letter of word) sum = (sum * 31 + letter.codePointAt(0)) % 100003;
  return colour(sum);
}

function short(value) {
  const size = Math.abs(value);
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (size === 0) return "0";
  if (size >= 1e9) return value.toExponential(2);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = seconds / 60;
  return minutes < 120 ? `${Math.round(minutes)} min` : `${(minutes / 60).toFixed(1)} h`;
}

// Returns round numbers within a range, spaced by 1, 2, 2.5 or 5 times a power of ten.
function ticksBetween(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const spacing = [1, 2, 2.5, 5, 10].map(m => m * power).find(m => m >= raw * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / spacing - 1e-9); k * spacing <= high + spacing * 1e-9; k += 1) {
    ticks.push(Number((k * spacing).toPrecision(9)));
  }
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) ticks.push(10 ** k);
  const within = ticks.filter(tick => tick >= low * 0.999 && tick <= high * 1.001);
  return within.length >= 2 ? within : [low, high];
}

const tip = h("div", {class: "tip", role: "status", hidden: true});

function showTip(event, ...children) {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const left = event.clientX + 16 + tip.offsetWidth > innerWidth - 6
    ? event.clientX - tip.offsetWidth - 16 : event.clientX + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 6))}px`;
}

const hideTip = () => { tip.hidden = true; };
