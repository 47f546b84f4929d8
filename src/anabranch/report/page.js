// Zoom, pan and tooltips for the timelines. The picture is complete without this script; it redraws
// what lies along the axis of time by the same rules (see gantt.py) for the part that is in view.
"use strict";
(() => {
  const source = document.getElementById("timeline-data");
  const box = document.getElementById("timeline");
  if (!source || !box) return;
  const data = JSON.parse(source.textContent);
  for (const panel of data.panels) {
    for (const key of ["rows", "sums", "updates"]) {
      panel[key] = panel[key].map((row) => (typeof row === "number" ? panel[key][row] : row));
    }
  }
  const svg = box.querySelector("svg");
  const tip = document.getElementById("tip");
  const axis = svg.querySelector("g.axis");
  const groups = [...svg.querySelectorAll("g.panel")];
  const note = svg.querySelector("text.note");
  const untouched = [axis, ...groups].map((g) => g.innerHTML);
  const { left, right, horizon } = data;
  let from = 0;
  let to = horizon;

  const x = (t) => left + ((t - from) * (right - left)) / (to - from);
  const timeAt = (px) => from + ((px - left) * (to - from)) / (right - left);
  const clamp = (v, low, high) => Math.min(Math.max(v, low), high);
  const n = (v) => String(Math.round(v * 100) / 100);
  const rect = (css, rx, y, w, h, more = "") =>
    `<rect class="${css}" x="${n(rx)}" y="${n(y)}" width="${n(w)}" height="${n(h)}"${more}/>`;

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

  function ms(us) {
    const v = us / 1000;
    const digits = v === 0 ? 0 : clamp(2 - Math.floor(Math.log10(Math.abs(v))), 0, 6);
    return Number(v.toFixed(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  }

  function ticks() {
    const raw = (to - from) / Math.max(1, Math.round((right - left) / 90));
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999);
    const times = [];
    for (let k = Math.ceil(from / step - 1e-9); k * step <= to + 1e-9 * step; k++) times.push(k * step);
    return times;
  }

  function drawAxis() {
    return ticks()
      .map((t) => {
        const lines = data.panels.map((p) => `M${n(x(t))} ${p.tops[0] - 4}V${p.bottom + 4}`).join("");
        return (
          `<path class="rule" d="${lines}"/>` +
          `<text class="muted num" x="${n(x(t))}" y="${data.axis + 18}" font-size="11">${ms(t)}</text>`
        );
      })
      .join("");
  }

  function drawArrows(panel, out) {
    for (const [a, b, start, end, forward] of panel.messages) {
      if (start < from || end > to) continue;
      const down = a < b;
      const y1 = panel.tops[a] + (down ? panel.rowHeight : 0);
      const y2 = panel.tops[b] + (down ? 0 : panel.rowHeight);
      const reach = down ? 4.5 : -4.5;
      const bend = (y2 - reach - y1) / 2;
      const css = forward ? "f" : "b";
      const [x1, x2] = [n(x(start)), n(x(end))];
      out.push(
        `<path class="w${css}" stroke-width="1.3" d="M${x1} ${n(y1)}C${x1} ${n(y1 + bend)} ${x2} ` +
          `${n(y1 + bend)} ${x2} ${n(y2 - reach)}"/><path class="h${css}" d="M${x2} ${n(y2)}l-2.6 ${-reach}h5.2z"/>`,
      );
    }
  }

  function drawMarks(panel, out) {
    for (const [a, , start, end, forward] of panel.messages) {
      if (end < from || start > to) continue;
      const x1 = x(Math.max(start, from));
      const y = panel.tops[a] + panel.boxHeight + 0.75;
      out.push(rect(forward ? "hf" : "hb", x1, y, Math.max(x(Math.min(end, to)) - x1, 0.5), data.mark - 1));
    }
  }

  function drawOne(panel, span, top, out) {
    const [start, end, kind, , microbatch] = span;
    const css = data.kinds[kind][0];
    const x1 = x(Math.max(start, from));
    const width = Math.max(x(Math.min(end, to)) - x1, 0.4);
    const gap = width > 4 ? 0.5 : 0;
    out.push(rect(css, x1, top, width - gap, panel.boxHeight, width > 6 ? ' rx="2"' : ""));
    const label = String(microbatch);
    const size = panel.numberSize[kind];
    if (!size || label.length * size * 0.635 + 3 > width) return;
    const baseline = top + panel.boxHeight / 2 + size * 0.36;
    out.push(
      `<text class="num t${css}" x="${n(x1 + (width - gap) / 2)}" y="${n(baseline)}" font-size="${size}">${label}</text>`,
    );
  }

  function drawMerged(panel, run, top, out) {
    const seconds = new Map();
    for (const [start, end, kind] of run) seconds.set(kind, (seconds.get(kind) || 0) + end - start);
    const whole = [...seconds.values()].reduce((a, b) => a + b, 0);
    const x1 = x(Math.max(run[0][0], from));
    const width = Math.max(x(Math.min(run[run.length - 1][1], to)) - x1, 0.4);
    for (const kind of [...seconds.keys()].sort()) {
      const tall = panel.boxHeight * (whole ? seconds.get(kind) / whole : 1 / seconds.size);
      out.push(rect(data.kinds[kind][0], x1, top, width, tall, ' shape-rendering="crispEdges"'));
      top += tall;
    }
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
      const narrow = span[1] - span[0] < pixel;
      const fits =
        run.length &&
        span[0] - run[run.length - 1][1] < pixel &&
        span[1] - run[0][0] < data.mergedPixels * pixel;
      if (!(narrow && fits)) flush();
      run.push(span);
      if (!narrow) flush();
    }
    flush();
    return merged;
  }

  function drawRow(panel, row, top, out) {
    for (const run of runs(row)) {
      if (run.length === 1) drawOne(panel, run[0], top, out);
      else drawMerged(panel, run, top, out);
    }
  }

  // Updates, or all-reduces at the foot of a row.
  function drawStrip(css, spans, y, high, out) {
    for (const run of runs(spans)) {
      const x1 = x(Math.max(run[0][0], from));
      const width = Math.max(x(Math.min(Math.max(...run.map((s) => s[1])), to)) - x1, 0.4);
      out.push(rect(css, x1, y, width - (width > 4 ? 0.5 : 0), high));
    }
  }

  // One size of numbers for all boxes of a kind: the largest that fits a typical one.
  function numberSize(panel, [duration, digits]) {
    const width = (duration * (right - left)) / (to - from);
    return data.numberSizes.find((s) => s + 2 <= panel.boxHeight && digits * s * 0.635 + 3 <= width);
  }

  // All rectangles of a class as one path; everything else comes after them.
  function joined(pieces) {
    const paths = new Map();
    const rest = [];
    for (const piece of pieces) {
      const match = /^<rect class="([^"]+)" x="([^"]+)" y="([^"]+)" width="([^"]+)" height="([^"]+)"/.exec(piece);
      if (!match) rest.push(piece);
      else {
        const [, css, px, py, w, h] = match;
        if (!paths.has(css)) paths.set(css, []);
        paths.get(css).push(`M${px} ${py}h${w}v${h}h-${w}z`);
      }
    }
    const whole = ([css, d]) => `<path class="${css}" shape-rendering="crispEdges" d="${d.join("")}"/>`;
    return [...[...paths].map(whole), ...rest];
  }

  function drawPanel(panel) {
    const out = [];
    panel.numberSize = panel.typical.map((kind) => numberSize(panel, kind));
    const end = Math.max(panel.step, panel.makespan);
    for (const top of panel.tops) {
      const wide = clamp(x(end), left, right) - left;
      out.push(rect("lane", left, top, wide, panel.rowHeight, ' rx="2"'));
      const [a, b] = [clamp(x(panel.makespan), left, right), clamp(x(panel.step), left, right)];
      if (b - a >= 2) out.push(rect("tail", a, top, b - a, panel.rowHeight));
    }
    (panel.hasArrows ? drawArrows : drawMarks)(panel, out);
    panel.rows.forEach((row, i) => {
      const top = panel.tops[i];
      drawRow(panel, row, top, out);
      drawStrip("update", panel.updates[i], top, panel.boxHeight, out);
      drawStrip("sum", panel.sums[i], top + panel.rowHeight - panel.sumHeight + 1, panel.sumHeight - 1, out);
    });
    if (out.length > data.mostBoxes) out.splice(0, out.length, ...joined(out));
    if (panel.step >= from && panel.step <= to) {
      const path = `M${n(x(panel.step))} ${panel.tops[0] - 5}V${panel.bottom + 5}`;
      out.push(`<path class="end" stroke-width="1.5" stroke-dasharray="4 3" d="${path}"/>`);
    }
    return out.join("");
  }

  function redraw() {
    const whole = from === 0 && to === horizon;
    [axis, ...groups].forEach((group, i) => {
      if (whole) group.innerHTML = untouched[i];
      else group.innerHTML = i === 0 ? drawAxis() : drawPanel(data.panels[i - 1]);
    });
    if (note) note.style.visibility = whole ? "" : "hidden";
    svg.classList.toggle("zoomed", !whole);
    hide();
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

  // Where the pointer is, in the units of the picture.
  function locate(event) {
    const area = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / area.width;
    return [(event.clientX - area.left) * scale, (event.clientY - area.top) * scale];
  }

  function actionAt(px, py) {
    if (px < left || px > right) return null;
    const t = timeAt(px);
    const reach = ((to - from) / (right - left)) * 1.5;
    for (const panel of data.panels) {
      const r = panel.tops.findIndex((top) => py >= top && py <= top + panel.rowHeight);
      if (r < 0) continue;
      const isSum = py > panel.tops[r] + panel.rowHeight - panel.sumHeight;
      const update = panel.updates[r].find((s) => s[0] <= t && t <= s[1]);
      if (update && !isSum) return [panel, r, update, isSum];
      const row = (isSum ? panel.sums : panel.rows)[r];
      const i = firstAfter(row, t);
      if (i < row.length && row[i][0] <= t) return [panel, r, row[i], isSum];
      const near = [row[i - 1], row[i]].filter((s) => s && s[0] - reach < t && t < s[1] + reach);
      return [panel, r, near[0] || null, isSum];
    }
    return null;
  }

  function describe([panel, r, span, isSum]) {
    const device = `device ${panel.devices[r]}`;
    if (!span) return [device, isSum ? "no all-reduce" : "waiting"];
    const [start, end] = span;
    const times = `${ms(end - start)} ms, from ${ms(start)} to ${ms(end)} ms`;
    if (isSum) {
      const [, , bytes, stages] = span;
      const which = `stage${/^\d+$/.test(stages) ? "" : "s"} ${stages}`;
      return [`all-reduce \u00b7 ${bytes} of gradients`, times, `${device} \u00b7 ${which}`];
    }
    if (span.length === 3) return [span[2], times, device];
    const [, , kind, stage, microbatch] = span;
    const size = panel.microbatchSize[stage] || 0;
    const first = (microbatch * size) % (data.isEndless ? panel.batchSize : Infinity);
    const last = Math.min(first + size, panel.batchSize) - 1;
    return [
      `stage ${stage} \u00b7 ${data.kinds[kind][1]} \u00b7 ${data.counted} ${microbatch}`,
      times,
      `${device} \u00b7 samples ${first === last ? first : `${first} to ${last}`}`,
      panel.operators[stage] || "",
    ];
  }

  function hide() {
    tip.hidden = true;
    svg.querySelector(".hot")?.remove();
  }

  function point(event) {
    const target = actionAt(...locate(event));
    hide();
    if (!target) return;
    tip.replaceChildren(
      ...describe(target).filter(Boolean).map((line) => {
        const element = document.createElement("div");
        element.textContent = line;
        return element;
      }),
    );
    tip.hidden = false;
    const wide = tip.offsetWidth;
    tip.style.left = `${clamp(event.clientX + 14, 8, Math.max(8, window.innerWidth - wide - 8))}px`;
    const below = event.clientY + 18;
    const fits = below + tip.offsetHeight < window.innerHeight;
    tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 12}px`;
    const [panel, r, span, isSum] = target;
    if (!span) return;
    const a = clamp(x(span[0]), left, right);
    const b = clamp(x(span[1]), left, right);
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const high = isSum ? panel.sumHeight : panel.boxHeight;
    const y = isSum ? panel.tops[r] + panel.rowHeight - high : panel.tops[r];
    const place = { class: "hot", x: a, y, width: Math.max(b - a, 1), height: high, rx: isSum ? 0 : 2 };
    for (const [key, value] of Object.entries(place)) mark.setAttribute(key, value);
    svg.append(mark);
  }

  let held = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) held = [locate(event)[0], from, to];
    if (event.pointerType !== "mouse") point(event);
  });
  window.addEventListener("pointerup", () => (held = null));
  svg.addEventListener("pointermove", (event) => {
    if (!held || held[2] - held[1] >= horizon) return point(event);
    const moved = ((locate(event)[0] - held[0]) * (to - from)) / (right - left);
    show(held[1] - moved, held[2] - moved);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("dblclick", (event) => zoom(0.4, timeAt(clamp(locate(event)[0], left, right))));
  svg.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(Math.exp(clamp(event.deltaY, -80, 80) * 0.006), timeAt(clamp(locate(event)[0], left, right)));
    },
    { passive: false },
  );
  const act = {
    in: () => zoom(0.5, (from + to) / 2),
    out: () => zoom(2, (from + to) / 2),
    back: () => pan(-0.4),
    on: () => pan(0.4),
    all: () => show(0, horizon),
  };
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "back", ArrowRight: "on", 0: "all" };
  document.querySelectorAll("[data-zoom]").forEach((button) => {
    button.addEventListener("click", () => act[button.dataset.zoom]());
  });
  document.getElementById("zoom").hidden = false;
  box.addEventListener("keydown", (event) => {
    const name = keys[event.key];
    if (!name || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act[name]();
  });
})();
