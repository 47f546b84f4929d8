// Timelines and memory on canvases under one axis of time: zoom, pan, tooltips, lanes that open to
// their replicas, the critical path; and links between stage graph, lanes and table. Without this
// script a page has its tables and, unless they are large, the same pictures without all of that.
"use strict";
(() => {
  const source = document.getElementById("timeline-data");
  const box = document.getElementById("timeline");
  if (!source || !box) return;
  const data = JSON.parse(source.textContent);
  const tip = document.getElementById("tip");
  const said = document.getElementById("said");
  const horizon = data.horizon;
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
  // Two replicas do the same where no time differs by more than a hundredth of the whole.
  const near = (a, b) => Math.abs(a - b) < horizon / 100;
  const isLike = ([start, end, what], other) => near(start, other[0]) && near(end, other[1]) && what === other[2];
  const same = (a, b) => a === b || (a.length === b.length && a.every((span, k) => isLike(span, b[k])));
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
      lane.isAlike = ["rows", "sums", "updates"].every((key) =>
        lane.rows.every((i) => same(panel[key][i], panel[key][lane.rows[0]])),
      );
      lane.isOpen = !lane.isAlike;
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
    const what = stage && width < 640 ? "" : `device${devices.length > 1 ? "s" : ""} `;
    return [stage, what + ranges(devices)].filter(Boolean).join(" \u00b7 ");
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
          context.fillStyle = colour(name.replace("on path ", ""));
          context.globalAlpha = isDim && !/lane|rule|on path/.test(name) ? 0.3 : 1;
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
    let [y, widest] = [4, 60];
    for (const panel of data.panels) {
      panel.sums_ = panel.sumHeight ? strip : 0;
      panel.mark = panel.hasArrows ? 0 : data.mark;
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
        run.length && span[0] - run.at(-1)[1] < pixel && span[1] - run[0][0] < data.mergedPixels * pixel;
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
        const [, , kind, , microbatch] = run[0];
        const size = panel.numberSize[kind];
        const colour = data.kinds[kind][0];
        p.box(isOnPath(panel, row, run[0]) ? `on path ${colour}` : colour, a, top, wide, panel.boxHeight);
        if (size && String(microbatch).length * size * 0.635 + 3 <= wide)
          p.text(`${colour}-ink`, a + wide / 2, top + panel.boxHeight / 2 + size * 0.36, size, microbatch, "center");
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

  // One stage in stage graph, lanes and table.
  const linked = new Map();
  function link(element, graph, stage, role) {
    const key = `${graph} ${stage}`;
    if (!linked.has(key)) linked.set(key, []);
    linked.get(key).push(element);
    if (role) element.setAttribute("role", role);
    element.tabIndex = 0;
    element.setAttribute("aria-label", element.querySelector("title")?.textContent || `stage ${stage}`);
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

  function announce() {
    const panel = chosen && data.panels.find((panel) => panel.graph === chosen[0]);
    const lane = panel?.lanes.find((lane) => lane.stages.includes(chosen[1]));
    if (!lane) return (said.textContent = "");
    const state = lane.isOpen ? "open" : `folded, ${lane.rows.length} devices that do the same`;
    const replicas = lane.rows.length > 1 ? ` \u00b7 ${state}; Enter changes that` : "";
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
      const more = row.lane.rows.length > 1 ? `click to ${row.lane.isOpen ? "fold" : "show every device"}` : "";
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
})();
