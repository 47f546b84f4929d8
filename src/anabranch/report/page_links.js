// Links, pointer, keys, switches and search of the page; goes on where page.js ends.
// One stage in stage graph, lanes and table.
const linked = new Map();
function link(element, graph, stage, role) {
  const key = `${graph} ${stage}`;
  if (!linked.has(key)) linked.set(key, []);
  linked.get(key).push(element);
  element.tabIndex = 0;
  if (role) {
    element.setAttribute("role", role);
    element.setAttribute("aria-label", element.querySelector("title").textContent);
    element.closest("svg").setAttribute("role", "group"); // of an image nothing inside is read
  }
  element.addEventListener("pointerenter", () => light([graph, stage]));
  element.addEventListener("pointerleave", () => light(chosen));
  element.addEventListener("click", (event) => event.target.closest("details,a") || choose([graph, stage]));
  element.addEventListener("keydown", (event) => {
    if (event.target !== element || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    choose([graph, stage]);
  });
}
for (const drawn of document.querySelectorAll(".stages [data-stage]")) {
  link(drawn, Number(drawn.closest("[data-graph]").dataset.graph), Number(drawn.dataset.stage), "button");
}
const table = document.querySelector("table[data-graph]");
if (table) [...table.tBodies[0].rows].forEach((row, stage) => link(row, Number(table.dataset.graph), stage));

function light(key) {
  for (const element of document.querySelectorAll(".lit")) element.classList.remove("lit");
  for (const { lit } of pictures) lit.replaceChildren();
  if (!key) return;
  for (const element of linked.get(key.join(" ")) || []) element.classList.add("lit");
  const mark = ({ lit }, top, height) =>
    lit.append(make("div", { class: "lane-mark", style: `top:${top}px;height:${height}px;left:${left - 6}px` }));
  for (const panel of data.panels.filter((panel) => panel.graph === key[0])) {
    for (const row of panel.shown) if (row.lane.stages.includes(key[1])) mark(main, row.top, panel.rowHeight);
  }
  if (!memory || withMemory[0].graph !== key[0]) return;
  for (const row of memory.rows) if (row.lane.stages.includes(key[1])) mark(memory, row.top, row.height);
}

function choose(key) {
  chosen = key && String(key) === String(chosen) ? null : key;
  for (const [name, elements] of linked) {
    const isChosen = chosen !== null && name === chosen.join(" ");
    for (const element of elements) element.classList.toggle("chosen", isChosen);
  }
  light(chosen);
  announce();
}

function likeness({ rows, apart }) {
  const share = apart === Infinity ? "" : `, within ${(100 * apart).toFixed(1)}% of the whole`;
  return `${rows.length} devices that do ${share ? "the same" : "not the same"}${apart ? share : ""}`;
}

function announce() {
  const panel = chosen && data.panels.find((panel) => panel.graph === chosen[0]);
  const lane = panel?.lanes.find((lane) => lane.stages.includes(chosen[1]));
  if (!lane) return (said.textContent = "");
  const replicas = lane.rows.length > 1 ? ` \u00b7 ${likeness(lane)}; Enter ${lane.isOpen ? "folds" : "opens"} it` : "";
  said.textContent = `${laneName(panel, lane)} \u00b7 ${panel.operators[chosen[1]]}${replicas}`;
}

function toggle(lanes, isOpen) {
  for (const lane of lanes) lane.isOpen = isOpen ?? !lane.isOpen;
  redraw();
  announce();
}

function show(a, b) {
  const span = clamp(b - a, Math.min(horizon, 0.01), horizon);
  from = clamp(a, 0, horizon - span);
  to = from + span;
  if (span > horizon * 0.999) [from, to] = [0, horizon];
  redraw();
}
const zoom = (factor, at) => show(at - (at - from) * factor, at + (to - at) * factor);
const pan = (share) => show(from + (to - from) * share, to + (to - from) * share);

const locate = (event) => {
  const area = event.currentTarget.getBoundingClientRect();
  return [event.clientX - area.left, event.clientY - area.top];
};

// Panel, row, action (or null) and whether it is an all-reduce.
function actionAt(px, py) {
  for (const panel of data.panels) {
    const row = panel.shown.find(({ top }) => py >= top && py <= top + panel.rowHeight);
    if (!row) continue;
    if (px < left || px > right) return { panel, row, isLabel: true };
    const t = timeAt(px);
    const reach = ((to - from) / (right - left)) * 1.5;
    const isSum = py > row.top + panel.rowHeight - panel.sums_;
    const update = panel.updates[row.i].find((s) => s[0] <= t && t <= s[1]);
    if (update && !isSum) return { panel, row, span: update, isSum };
    const spans = (isSum ? panel.sums : panel.rows)[row.i];
    const i = firstAfter(spans, t);
    if (i < spans.length && spans[i][0] <= t) return { panel, row, span: spans[i], isSum };
    const near = [spans[i - 1], spans[i]].filter((s) => s && s[0] - reach < t && t < s[1] + reach);
    return { panel, row, span: near[0] || null, isSum };
  }
  return null;
}

function describe({ panel, row, span, isSum }, t) {
  const device = row.lane.isOpen || row.lane.rows.length === 1 ? `device ${panel.devices[row.i]}` : laneName(panel, row.lane);
  const steps = panel.memory[row.i];
  const held = steps.length ? `memory ${memoryText(memoryAt(steps, t))} at ${ms(t)} ms` : "";
  if (!span) return [device, isSum ? "no all-reduce" : "waiting", held];
  const [start, end] = span;
  const times = `${ms(end - start)} ms, from ${ms(start)} to ${ms(end)} ms`;
  if (isSum) {
    const [, , bytes, stages] = span;
    const which = `stage${/^\d+$/.test(stages) ? "" : "s"} ${stages}`;
    return [`all-reduce \u00b7 ${bytes} of gradients`, times, `${device} \u00b7 ${which}`];
  }
  if (span.length === 3) return [span[2], times, device, held];
  const [, , kind, stage, microbatch] = span;
  const size = panel.microbatchSize[stage] || 0;
  const first = (microbatch * size) % (data.isEndless ? panel.batchSize : Infinity);
  const last = Math.min(first + size, panel.batchSize) - 1;
  return [
    `stage ${stage} \u00b7 ${data.kinds[kind][1]} \u00b7 ${data.counted} ${microbatch}`,
    times,
    `${device} \u00b7 samples ${first === last ? first : `${first} to ${last}`}`,
    panel.operators[stage] || "",
    held,
  ];
}

function hide() {
  tip.hidden = true;
  for (const { cursor, hot } of pictures) cursor.hidden = hot.hidden = true;
}

function put(element, box) {
  for (const [side, value] of Object.entries(box)) element.style[side] = `${value}px`;
  element.hidden = false;
}

function showTip(lines, event) {
  tip.replaceChildren(...lines.filter(Boolean).map((line) => make("div", {}, line)));
  const below = event.clientY + 18;
  tip.hidden = false;
  const fits = below + tip.offsetHeight < window.innerHeight;
  put(tip, {
    left: clamp(event.clientX + 14, 8, Math.max(8, window.innerWidth - tip.offsetWidth - 8)),
    top: fits ? below : event.clientY - tip.offsetHeight - 12,
  });
}

function moveCursor(px) {
  hide();
  if (px >= left && px <= right) for (const { cursor } of pictures) put(cursor, { left: px });
}

function point(event) {
  const [px, py] = locate(event);
  moveCursor(px);
  const target = actionAt(px, py);
  if (!target) return light(chosen);
  const { panel, row, span, isSum, isLabel } = target;
  const stage = span && span.length === 5 ? span[3] : row.lane.stages[0];
  light(stage === undefined ? chosen : [panel.graph, stage]);
  main.canvas.style.cursor = isLabel && row.lane.rows.length > 1 ? "pointer" : "";
  if (isLabel) {
    const more = row.lane.rows.length > 1 ? `${likeness(row.lane)}: click to ${row.lane.isOpen ? "fold" : "show each"}` : "";
    return showTip([laneName(panel, row.lane), row.operators, more], event);
  }
  showTip(describe(target, timeAt(px)), event);
  if (!span) return;
  const high = isSum ? panel.sums_ : panel.boxHeight;
  const top = isSum ? row.top + panel.rowHeight - high : row.top;
  put(main.hot, { left: inside(span[0]), width: Math.max(inside(span[1]) - inside(span[0]), 1), top, height: high });
}

let held = null; // [x, from, to] where a drag began
let hasMoved = false;
main.canvas.addEventListener("pointerdown", (event) => {
  hasMoved = false;
  if (event.pointerType === "mouse" && event.button === 0) held = [locate(event)[0], from, to];
  if (event.pointerType !== "mouse") point(event);
});
window.addEventListener("pointerup", () => (held = null));
main.canvas.addEventListener("pointermove", (event) => {
  if (!held || held[2] - held[1] >= horizon) return point(event);
  const moved = ((locate(event)[0] - held[0]) * (to - from)) / (right - left);
  hasMoved ||= Math.abs(locate(event)[0] - held[0]) > 3;
  show(held[1] - moved, held[2] - moved);
});
main.canvas.addEventListener("click", (event) => {
  const target = hasMoved ? null : actionAt(...locate(event));
  if (!target) return;
  const { panel, row, span, isLabel } = target;
  const stage = span && span.length === 5 ? span[3] : row.lane.stages[0];
  if (isLabel && row.lane.rows.length > 1) toggle([row.lane]);
  else if (stage !== undefined) choose([panel.graph, stage]);
});
memory?.canvas.addEventListener("pointermove", (event) => {
  const [px, py] = locate(event);
  moveCursor(px);
  const row = memory.rows.find(({ top, height }) => py >= top && py <= top + height);
  if (!row || px < left || px > right) return light(chosen);
  const t = timeAt(px);
  light(row.lane.stages.length ? [withMemory[0].graph, row.lane.stages[0]] : chosen);
  const device = withMemory[0].devices[row.i];
  const levels = withMemory.map((panel) => {
    const i = panel.devices.indexOf(device);
    return i < 0 ? "" : `${panel.title}: ${memoryText(memoryAt(panel.memory[i], t))}, peak ${memoryText(panel.peaks[i])}`;
  });
  showTip([`${laneName(withMemory[0], row.lane)} at ${ms(t)} ms`, ...levels], event);
});
for (const { canvas } of pictures) {
  canvas.addEventListener("pointerleave", () => {
    hide();
    light(chosen);
  });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, timeAt(clamp(locate(event)[0], left, right))));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(Math.exp(clamp(event.deltaY, -80, 80) * 0.006), timeAt(clamp(locate(event)[0], left, right)));
    },
    { passive: false },
  );
}

// The next or the previous stage of the first timeline; up and down in the picture.
function step(by) {
  const { lanes, graph } = data.panels[0];
  const stages = lanes.flatMap((lane) => lane.stages);
  const at = chosen ? stages.indexOf(chosen[1]) : by > 0 ? -1 : stages.length;
  const next = stages[clamp(at + by, 0, stages.length - 1)];
  if (!chosen || next !== chosen[1]) choose([graph, next]);
}
const chosenLanes = () =>
  data.panels.filter((panel) => chosen && panel.graph === chosen[0])
    .flatMap((panel) => panel.lanes.filter((lane) => lane.rows.length > 1 && lane.stages.includes(chosen[1])));

const act = {
  in: () => zoom(0.5, (from + to) / 2),
  out: () => zoom(2, (from + to) / 2),
  back: () => pan(-0.4),
  on: () => pan(0.4),
  all: () => show(0, horizon),
  up: () => step(-1),
  down: () => step(1),
  open: () => toggle(chosenLanes()),
  none: () => choose(null),
};
const keys = {
  "+": "in", "=": "in", "-": "out", ArrowLeft: "back", ArrowRight: "on", 0: "all",
  ArrowUp: "up", ArrowDown: "down", Enter: "open", Escape: "none",
};
box.addEventListener("keydown", (event) => {
  const name = keys[event.key];
  if (!name || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act[name]();
});
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => act[button.dataset.zoom]());
}

const switches = {
  replicas: [data.panels.some((panel) => panel.lanes.some((lane) => lane.rows.length > 1)), (isOn) =>
    toggle(data.panels.flatMap((panel) => panel.lanes), isOn)],
  path: [data.panels.some((panel) => panel.path.length), (isOn) => {
    showsPath = isOn;
    redraw();
  }],
};
for (const button of document.querySelectorAll("[data-switch]")) {
  const [isUseful, turn] = switches[button.dataset.switch];
  button.hidden = !isUseful;
  button.addEventListener("click", () => {
    const isOn = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", isOn);
    turn(isOn);
  });
}
document.getElementById("zoom").hidden = false;

// Rows of the table whose operators have the words in their names.
const search = document.getElementById("search");
search?.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (text) => words.every((word) => text.toLowerCase().includes(word));
  let [operators, stages] = [0, 0];
  for (const row of table.tBodies[0].rows) {
    const cell = row.cells[row.cells.length - 1];
    const items = [...cell.querySelectorAll("li")];
    for (const item of items) item.hidden = !matches(item.textContent);
    const count = items.length ? items.filter((item) => !item.hidden).length : Number(matches(cell.title || cell.textContent));
    row.hidden = !count;
    operators += count;
    stages += count ? 1 : 0;
    const details = cell.querySelector("details");
    if (details) details.open = words.length > 0 && count > 0;
  }
  const result = document.getElementById("matches");
  result.textContent = words.length ? `${operators} operator${operators === 1 ? "" : "s"} in ${stages} stage${stages === 1 ? "" : "s"}` : "";
});
if (search) search.closest("p").hidden = false;

redraw();
let known = width;
new ResizeObserver(() => {
  if (main.place.clientWidth && main.place.clientWidth !== known) redraw();
  known = main.place.clientWidth;
}).observe(main.place);
window.matchMedia("(prefers-color-scheme:dark)").addEventListener("change", redraw);
