// Timelines and memory on canvases under one axis of time: zoom, pan, tooltips, lanes that open to
// their replicas, the critical path; and links between stage graph, lanes and table. Without this
// script a page has its tables, its stage graph and its losses.
// page_links.js goes on in the same function: what follows the pointer and the keys.
"use strict";
const source = document.getElementById("timeline-data");
const box = document.getElementById("timeline");
if (!source || !box) return;
const data = JSON.parse(source.textContent);
const tip = document.getElementById("tip");
const said = document.getElementById("said");
const horizon = data.horizon;
const MERGED = 3; // most pixels of a box of several actions: wider ones would hide bubbles
const MARK = 3; // height of the marks of messages below a row, where they are too many for arrows
let from = 0;
let to = horizon;
let [width, left, right] = [0, 0, 0];
let showsPath = false;
let chosen = null; // [graph, stage] that was clicked

const clamp = (v, low, high) => Math.min(Math.max(v, low), high);
const x = (t) => left + ((t - from) * (right - left)) / (to - from);
const inside = (t) => clamp(x(t), left, right);
const timeAt = (px) => from + ((px - left) * (to - from)) / (right - left);
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

// Lanes: a stage with all its devices, folded to one row where these do the same.
// How far apart two replicas are that do the same in the same order; else infinity.
function apart(a, b) {
  if (a === b) return 0;
  if (a.length !== b.length || a.some((span, k) => span[2] !== b[k][2] || span[4] !== b[k][4])) return Infinity;
  return Math.max(0, ...a.map((span, k) => Math.max(Math.abs(span[0] - b[k][0]), Math.abs(span[1] - b[k][1]))));
}
for (const panel of data.panels) {
  for (const key of ["rows", "sums", "updates", "sends", "memory"]) {
    panel[key] = panel[key].map((row) => (typeof row === "number" ? panel[key][row] : row));
  }
  panel.lanes = [];
  panel.devices.forEach((_, i) => {
    const last = panel.lanes.at(-1);
    if (last && last.stages.length && String(last.stages) === String(panel.stages[i])) last.rows.push(i);
    else panel.lanes.push({ stages: panel.stages[i], branch: panel.branches[i], rows: [i] });
  });
  for (const lane of panel.lanes) {
    const others = lane.rows.slice(1).flatMap((i) =>
      ["rows", "sums", "updates"].map((key) => apart(panel[key][i], panel[key][lane.rows[0]])),
    );
    lane.apart = Math.max(0, ...others) / Math.max(panel.step, panel.makespan, 1e-9);
    lane.isOpen = lane.apart > 0.05;
  }
}
const withMemory = data.panels.filter((panel) => panel.memory.some((steps) => steps.length)).slice(0, 2);

function ranges(numbers) {
  const runs = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (runs.length && runs.at(-1)[1] === number - 1) runs.at(-1)[1] = number;
    else runs.push([number, number]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}

function laneName(panel, lane) {
  const stage = lane.stages.length ? `stage${lane.stages.length > 1 ? "s" : ""} ${ranges(lane.stages)}` : "";
  const devices = lane.rows.map((i) => panel.devices[i]);
  if (stage && width < 640) return devices.length > 1 ? `${stage} \u00d7${devices.length}` : stage;
  return [stage, `device${devices.length > 1 ? "s" : ""} ${ranges(devices)}`].filter(Boolean).join(" \u00b7 ");
}

function rowName(panel, { lane, i }) {
  if (lane.rows.length === 1) return laneName(panel, lane);
  if (!lane.isOpen) return `\u25b8 ${laneName(panel, lane)}`;
  return i === lane.rows[0] ? `\u25be ${laneName(panel, { ...lane, rows: [i] })}` : `device ${panel.devices[i]}`;
}

function ms(us) {
  const v = us / 1000;
  const digits = v === 0 ? 0 : clamp(2 - Math.floor(Math.log10(Math.abs(v))), 0, 6);
  return Number(v.toFixed(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

function memoryText(bytes) {
  if (bytes > 2 ** 29) return `${(bytes / 2 ** 30).toFixed(2)} GiB`;
  return bytes >= 2 ** 20 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 2 ** 10).toFixed(1)} KiB`;
}

// The first action of a row that ends after t.
function firstAfter(row, t) {
  let low = 0;
  let high = row.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (row[mid][1] <= t) low = mid + 1;
    else high = mid;
  }
  return low;
}

function memoryAt(steps, t) {
  let bytes = 0;
  for (const [start, level] of steps) {
    if (start > t) break;
    bytes = level;
  }
  return bytes;
}

// A picture: a canvas, and over it the cursor, the pointed box and the lit lanes.
function picture(id) {
  const place = document.getElementById(id);
  if (!place) return null;
  const canvas = make("canvas", { role: "img", "aria-label": place.dataset.title });
  const parts = { canvas, cursor: make("div", { class: "cursor" }), hot: make("div", { class: "hot" }) };
  parts.lit = make("div", { "aria-hidden": "true" });
  parts.cursor.hidden = parts.hot.hidden = true;
  place.replaceChildren(make("div", { class: "picture" }, canvas, parts.lit, parts.hot, parts.cursor));
  return { place, ...parts };
}
const main = picture("timeline");
const memory = withMemory.length ? picture("memory") : null;
const pictures = [main, memory].filter(Boolean);
const legend = data.legend.map(([css, label]) => make("li", {}, make("i", { class: css }), label));
main.place.prepend(make("ul", { class: "legend" }, ...legend, make("li", { class: "muted" }, data.note)));

const FONT = getComputedStyle(document.body).fontFamily;
const measure = document.createElement("canvas").getContext("2d");
const textWidth = (text, size) => {
  measure.font = `${size}px ${FONT}`;
  return measure.measureText(text).width;
};
function shorten(text, size, room) {
  for (let keep = text.length; keep > 2; keep--) {
    const head = keep >> 1;
    const short = keep === text.length ? text : `${text.slice(0, head)}\u2026${text.slice(text.length - keep + head)}`;
    if (textWidth(short, size) <= room) return short;
  }
  return "\u2026";
}

// Collects boxes by colour, lines and texts, and draws them in this order.
function pen({ canvas }, height) {
  const scale = Math.min(window.devicePixelRatio || 1, 16000 / height);
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`);
  const [boxes, lines, texts] = [new Map(), [], []];
  const isDim = showsPath && canvas === main.canvas;
  return {
    box(name, bx, y, w, h) {
      if (!boxes.has(name)) boxes.set(name, []);
      boxes.get(name).push([bx, y, w, h]);
    },
    line: (name, wide, points, more = {}) => lines.push([name, wide, points, more]),
    text: (...text) => texts.push(text), // colour, x, y, size, text, alignment, colour around it
    draw() {
      for (const [name, list] of boxes) {
        const [hue, tone = 0] = name.replace("on path ", "").split(" p");
        context.fillStyle = colour(hue);
        context.globalAlpha = (isDim && !/lane|rule|on path/.test(name) ? 0.3 : 1) * 0.6 ** tone;
        const isFew = list.length < 2000;
        for (const [bx, y, w, h] of list) {
          if (isFew && w > 6) {
            context.beginPath();
            context.roundRect(bx, y, w, h, 2);
            context.fill();
          } else context.fillRect(bx, y, w, h);
        }
      }
      context.globalAlpha = 1;
      for (const [name, wide, points, { dash = [], fill = 0 }] of lines) {
        context.strokeStyle = context.fillStyle = colour(name);
        context.lineWidth = wide;
        context.setLineDash(dash);
        context.beginPath();
        for (const point of points) {
          if (point.length === 3) context.moveTo(point[0], point[1]);
          else if (point.length === 6) context.bezierCurveTo(...point);
          else context.lineTo(...point);
        }
        if (fill) {
          context.globalAlpha = fill;
          context.fill();
          context.globalAlpha = 1;
        }
        if (wide) context.stroke();
      }
      context.setLineDash([]);
      context.lineWidth = 4;
      for (const [name, tx, y, size, text, align = "left", around = ""] of texts) {
        context.font = `${size}px ${FONT}`;
        context.textAlign = align;
        context.strokeStyle = colour(around);
        if (around) context.strokeText(text, tx, y);
        context.fillStyle = colour(name);
        context.fillText(text, tx, y);
      }
    },
  };
}

const rowsOf = (panel) =>
  panel.lanes.flatMap((lane) => (lane.isOpen ? lane.rows : lane.rows.slice(0, 1)).map((i) => ({ lane, i })));

// Places of all rows; returns the height of the picture.
function layOut() {
  width = main.place.clientWidth || 1236;
  const margin = width < 640 ? 8 : 22;
  for (const panel of data.panels) panel.shown = rowsOf(panel);
  const longest = Math.max(...data.panels.map((panel) => panel.shown.length));
  const [, [boxHeight, strip, gap, branchGap]] = data.rowSizes.find(([most]) => longest <= most);
  let [y, widest] = [12, 60];
  for (const panel of data.panels) {
    panel.sums_ = panel.sumHeight ? strip : 0;
    panel.mark = panel.hasArrows ? 0 : MARK;
    panel.rowHeight = boxHeight + panel.sums_;
    panel.boxHeight = boxHeight - panel.mark;
    panel.labelSize = Math.min(12, Math.max(panel.rowHeight - 1, 7.5));
    panel.heading = y + 14;
    y += 28;
    panel.shown.forEach((row, k) => {
      if (k) y += row.lane.branch === panel.shown[k - 1].lane.branch ? gap : branchGap;
      row.top = y;
      row.name = rowName(panel, row);
      row.operators = row.lane.stages.map((s) => panel.operators[s]).filter(Boolean).join("; ");
      y += panel.rowHeight;
      widest = Math.max(widest, textWidth(row.name, panel.labelSize));
      if (panel.rowHeight >= 30) widest = Math.max(widest, textWidth(row.operators, 10.5));
    });
    panel.bottom = y;
    y += 26;
  }
  left = margin + Math.min(widest, 0.3 * width) + 12;
  right = width - margin - 6;
  return y + 18;
}

function drawAxis(p, tops, y) {
  const raw = (to - from) / Math.max(1, Math.round((right - left) / 90));
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999);
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + 1e-9 * step; k++) {
    for (const [a, b] of tops) p.box("rule", x(k * step) - 0.5, a, 1, b - a);
    p.text("muted", x(k * step), y, 11, ms(k * step), "center");
  }
  p.text("muted", left - 12, y, 11, "time in ms", "right");
}

function drawLabel(p, name, second, top, height, size) {
  const room = left - 16;
  const middle = top + height / 2;
  if (height >= 30 && second) {
    p.text("ink", left - 12, middle - 2, size, shorten(name, size, room), "right");
    p.text("muted", left - 12, middle + 12, 10.5, shorten(second, 10.5, room), "right");
  } else p.text("ink", left - 12, middle + size * 0.36, size, shorten(name, size, room), "right");
}

// What is drawn as one: neighbours below a pixel, or one action or all-reduce that is wider.
function runs(row) {
  const pixel = (to - from) / (right - left);
  const merged = [];
  let run = [];
  const flush = () => {
    if (run.length) merged.push(run);
    run = [];
  };
  for (let i = firstAfter(row, from); i < row.length && row[i][0] < to; i++) {
    const span = row[i];
    const isNarrow = span[1] - span[0] < pixel;
    const fits =
      run.length && span[0] - run.at(-1)[1] < pixel && span[1] - run[0][0] < MERGED * pixel;
    if (!(isNarrow && fits)) flush();
    run.push(span);
    if (!isNarrow) flush();
  }
  flush();
  return merged;
}

const extent = (start, end) => {
  const wide = Math.max(inside(end) - inside(start), 0.4);
  return [inside(start), wide - (wide > 4 ? 0.5 : 0)];
};

const isOnPath = (panel, { lane }, [a, b]) =>
  showsPath && panel.path.some(([row, start, end]) => lane.rows.includes(row) && start < (a + b) / 2 && (a + b) / 2 < end);

function drawRow(p, panel, row) {
  const { i, top } = row;
  p.box("lane", left, top, inside(Math.max(panel.step, panel.makespan)) - left, panel.rowHeight);
  const [a, b] = [inside(panel.makespan), inside(panel.step)];
  if (b - a >= 2) p.box("tail", a, top, b - a, panel.rowHeight);
  for (const run of runs(panel.sends[i])) {
    const [a, wide] = extent(run[0][0], run.at(-1)[1]);
    p.box(run[0][2] ? "wire-forward" : "wire-backward", a, top + panel.boxHeight + 0.75, wide, panel.mark - 1);
  }
  for (const run of runs(panel.rows[i])) {
    const [a, wide] = extent(run[0][0], run.at(-1)[1]);
    if (run.length === 1) {
      const [, , kind, stage, microbatch] = run[0];
      const size = panel.numberSize[kind];
      const colour = data.kinds[kind][0];
      const tone = Math.min(row.lane.stages.indexOf(stage), 3); // of later stages of a device
      const shade = tone > 0 ? `${colour} p${tone}` : colour;
      p.box(isOnPath(panel, row, run[0]) ? `on path ${shade}` : shade, a, top, wide, panel.boxHeight);
      if (size && String(microbatch).length * size * 0.635 + 3 <= wide)
        p.text(tone > 0 ? "ink" : `${colour}-ink`, a + wide / 2, top + panel.boxHeight / 2 + size * 0.36, size, microbatch, "center");
      continue;
    }
    // Every kind fills its share of the height, so that areas stay true.
    const seconds = new Map();
    for (const [start, end, kind] of run) seconds.set(kind, (seconds.get(kind) || 0) + end - start);
    const whole = [...seconds.values()].reduce((m, n) => m + n, 0);
    let y = top;
    for (const kind of [...seconds.keys()].sort()) {
      const tall = panel.boxHeight * (whole ? seconds.get(kind) / whole : 1 / seconds.size);
      p.box(data.kinds[kind][0], a, y, wide, tall);
      y += tall;
    }
  }
  for (const run of runs(panel.updates[i])) p.box("update", ...pair(run, top, panel.boxHeight));
  const foot = top + panel.rowHeight - panel.sums_ + 1;
  for (const run of runs(panel.sums[i])) p.box("sum", ...pair(run, foot, panel.sums_ - 1));
}

function pair(run, y, high) {
  const [a, wide] = extent(run[0][0], Math.max(...run.map((span) => span[1])));
  return [a, y, wide, high];
}

const topOf = (panel, device) =>
  panel.shown.find((row) => row.i === device || (!row.lane.isOpen && row.lane.rows.includes(device))).top;

function drawArrows(p, panel) {
  for (const [a, b, start, end, isForward] of panel.messages) {
    const [y0, y3] = [topOf(panel, a), topOf(panel, b)];
    if (start < from || end > to || y0 === y3) continue;
    const isDown = y0 < y3;
    const [y1, y2] = isDown ? [y0 + panel.rowHeight, y3] : [y0, y3 + panel.rowHeight];
    const reach = isDown ? 4.5 : -4.5;
    const bend = (y2 - reach - y1) / 2;
    const [x1, x2] = [x(start), x(end)];
    const colour = isForward ? "wire-forward" : "wire-backward";
    p.line(colour, 1.3, [[x1, y1, 0], [x1, y1 + bend, x2, y1 + bend, x2, y2 - reach]]);
    p.line(colour, 0, [[x2, y2, 0], [x2 - 2.6, y2 - reach], [x2 + 2.6, y2 - reach]], { fill: 1 });
  }
}

function drawPath(p, panel) {
  const points = [];
  for (const [row, start, end] of panel.path) {
    const y = topOf(panel, row) + panel.boxHeight;
    if (end < from || start > to) continue;
    points.push(points.length ? [inside(start), y] : [inside(start), y, 0], [inside(end), y]);
  }
  p.line("end", 2, points);
}

function drawTimeline() {
  const height = layOut();
  const p = pen(main, height);
  drawAxis(p, data.panels.map((panel) => [panel.shown[0].top - 4, panel.bottom + 4]), height - 12);
  for (const panel of data.panels) {
    p.text("ink", width < 640 ? 8 : 22, panel.heading, 13, `${panel.title} \u00b7 ${panel.facts}`);
    panel.numberSize = panel.typical.map(([duration, digits]) => {
      const wide = (duration * (right - left)) / (to - from);
      return data.numberSizes.find((s) => s + 2 <= panel.boxHeight && digits * s * 0.635 + 3 <= wide);
    });
    panel.shown.forEach((row, k) => {
      drawRow(p, panel, row);
      if (panel.rowHeight >= 9 || k % 4 === 0)
        drawLabel(p, row.name, row.operators, row.top, panel.rowHeight, panel.labelSize);
    });
    if (panel.step >= from && panel.step <= to) {
      const end = x(panel.step);
      p.line("end", 1.5, [[end, panel.shown[0].top - 5, 0], [end, panel.bottom + 5]], { dash: [4, 3] });
    }
    if (panel.hasArrows) drawArrows(p, panel);
    if (showsPath) drawPath(p, panel);
  }
  p.draw();
}

// Under the timeline's axis: an area for the first timeline, a line over it for the second.
function drawMemory() {
  const [panel, other] = withMemory;
  memory.rows = rowsOf(panel);
  const most = Math.max(...withMemory.map((known) => Math.max(...known.peaks)));
  const high = memory.rows.length <= 8 ? 40 : memory.rows.length <= 16 ? 28 : 18;
  const [top, height] = [26, 26 + memory.rows.length * high + 30];
  const p = pen(memory, height);
  const size = Math.min(12, high - 5);
  withMemory.forEach((known, k) => {
    const at = left + k * 0.5 * (right - left);
    p.box(k ? "backward" : "forward", at, 8, 14, 8);
    p.text("ink", at + 20, 16, 12, known.title);
  });
  drawAxis(p, [[top, height - 26]], height - 10);
  memory.rows.forEach((row, k) => {
    const base = top + (k + 1) * high;
    row.top = base - high + 3;
    row.height = high - 3;
    p.box("lane", left, row.top, right - left, row.height);
    drawLabel(p, rowName(panel, row), "", row.top, row.height, size);
    const device = other ? other.devices.indexOf(panel.devices[row.i]) : -1;
    const series = [[panel, row.i, "forward"], ...(device < 0 ? [] : [[other, device, "backward"]])];
    for (const [known, i, colour] of series) {
      const points = [];
      const level = (bytes) => base - (bytes / most) * (row.height - 2);
      const end = Math.min(to, Math.max(known.step, known.makespan));
      let last = base;
      for (const [start, bytes] of [...known.memory[i], [end, null]]) {
        if (start >= from && points.length === 0) points.push([left, last, 0]);
        if (start >= from) points.push([inside(start), last]);
        if (start > to) break;
        last = bytes === null ? last : level(bytes);
        if (start >= from && bytes !== null) points.push([inside(start), last]);
      }
      if (colour === "backward") p.line(colour, 1.5, points);
      else if (points.length) {
        p.line(colour, 0, [[left, base, 0], ...points.map(([px, py]) => [px, py]), [points.at(-1)[0], base]], { fill: 0.35 });
        p.line(colour, 1, points);
      }
    }
    const peaks = series.map(([known, i]) => memoryText(known.peaks[i])).join(" \u00b7 ");
    if (high >= 18) p.text("ink", right - 6, row.top + size + 1, Math.min(11, size), `peak ${peaks}`, "right", "lane");
  });
  p.draw();
}

function redraw() {
  drawTimeline();
  if (memory) drawMemory();
  main.canvas.classList.toggle("zoomed", to - from < horizon);
  light(chosen);
  hide();
}

