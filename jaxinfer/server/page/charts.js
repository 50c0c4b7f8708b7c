// Pictures on canvas. Colours come from the style sheet, so that they follow the theme.

const probe = document.createElement("span");
probe.hidden = true;

/** The value of a colour of the style sheet, as canvas takes it. */
function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

/** Sizes a canvas to its box and the screen's pixels; returns a context in CSS pixels. */
function fit(canvas, height) {
  const width = canvas.clientWidth;
  if (height) canvas.style.height = `${height}px`;
  const tall = height ?? canvas.clientHeight;
  const ratio = devicePixelRatio || 1;
  const size = [Math.round(width * ratio), Math.round(tall * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height: tall };
}

const STATES = ["free", "used", "shared", "cached"];

/** Draws cells of one state; each has a shape of its own, for who cannot tell the colours. */
function drawCells(context, state, cells, size) {
  context.fillStyle = context.strokeStyle = colour(STATES[state]);
  context.lineWidth = 1;
  const hole = Math.max(1, Math.round(size / 3));
  const inset = (size - hole) / 2;
  for (const [x, y] of cells) {
    if (state === 0) {
      context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1); // an outline
    } else if (state === 3) {
      context.fillRect(x, y + Math.floor(size / 2), size, Math.ceil(size / 2)); // the lower half
      context.fillRect(x, y, 1, size);
      context.fillRect(x + size - 1, y, 1, size);
    } else {
      context.fillRect(x, y, size, size);
      if (state === 2) context.clearRect(x + inset, y + inset, hole, hole); // a ring
    }
  }
}

/** Draws the page pool, a cell a character of states, in rows. */
export function drawPool(canvas, states) {
  const width = canvas.clientWidth;
  if (!states.length || !width) return;
  const step = Math.max(4, Math.min(16, Math.floor(Math.sqrt((width * 170) / states.length))));
  const columns = Math.floor(width / step);
  const { context } = fit(canvas, Math.ceil(states.length / columns) * step);
  const size = step - (step > 8 ? 2 : 1);
  const byState = STATES.map(() => []);
  for (let i = 0; i < states.length; i++) {
    byState[states[i]]?.push([(i % columns) * step, Math.floor(i / columns) * step]);
  }
  byState.forEach((cells, state) => drawCells(context, state, cells, size));
}

/** Draws the legend's cell of one state. */
export function drawSwatch(canvas) {
  const { context } = fit(canvas);
  drawCells(context, Number(canvas.dataset.state), [[0, 0]], 12);
}

/** A round number at or above a value: 1, 2 or 5 and zeros. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((m) => m * power).find((top) => top >= value);
}

/** Draws lines over the last seconds; the first is filled, the second dashed. */
export function drawLines(canvas, points, names, seconds) {
  const { context, width, height } = fit(canvas);
  const top = roundUp(Math.max(1, ...points.flatMap((point) => names.map((name) => point[name]))));
  const [low, high, left] = [height - 4, 14, 34];
  const y = (value) => low - ((low - high) * value) / top;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of top > 1 ? [0, top / 2, top] : [0, top]) {
    context.strokeStyle = colour("line");
    context.setLineDash([]);
    context.lineWidth = 1;
    line(context, [[left, Math.round(y(value)) - 0.5], [width, Math.round(y(value)) - 0.5]]);
    context.fillStyle = colour("muted");
    context.fillText(value.toLocaleString("en-US", { notation: "compact" }), left - 6, y(value));
  }
  if (!points.length) return;
  const end = points[points.length - 1].time;
  const x = (time) => width - ((width - left) * (end - time)) / seconds;
  const shown = points.filter((point) => point.time >= end - seconds);
  names.forEach((name, i) => {
    const path = shown.map((point) => [x(point.time), y(point[name])]);
    context.strokeStyle = context.fillStyle = colour(i ? "shared" : "used");
    context.lineWidth = 1.75;
    context.setLineDash(i ? [4, 3] : []);
    line(context, path);
    if (!i) fill(context, path, low);
  });
}

function line(context, path) {
  context.beginPath();
  path.forEach(([x, y]) => context.lineTo(x, y));
  context.stroke();
}

function fill(context, path, low) {
  context.globalAlpha = 0.16;
  context.beginPath();
  context.moveTo(path[0][0], low);
  path.forEach(([x, y]) => context.lineTo(x, y));
  context.lineTo(path[path.length - 1][0], low);
  context.fill();
  context.globalAlpha = 1;
}

/** Draws a histogram of seconds, a bar a bucket, from the first bucket that has anything to the last. */
export function drawBars(canvas, { bounds, counts }, duration) {
  const { context, width, height } = fit(canvas);
  const low = height - 18;
  context.strokeStyle = colour("line");
  line(context, [[0, low + 0.5], [width, low + 0.5]]);
  const used = counts.map((count, i) => (count ? i : -1)).filter((i) => i >= 0);
  if (!used.length) return;
  const first = Math.max(0, used[0] - 1);
  const last = Math.min(counts.length - 1, used[used.length - 1] + 1);
  const step = Math.min(width / (last - first + 1), 56);
  const top = Math.max(...counts);
  context.textBaseline = "alphabetic";
  let free = 0; // where the next label may begin
  for (let i = first; i <= last; i++) {
    const x = (i - first) * step;
    const tall = ((low - 16) * counts[i]) / top;
    context.fillStyle = colour("used");
    context.fillRect(x + 1, low - (counts[i] ? Math.max(tall, 1.5) : 0), step - 2, Math.max(tall, counts[i] ? 1.5 : 0));
    context.fillStyle = colour("muted");
    context.textAlign = "center";
    if (counts[i] && step > 26) {
      const text = counts[i].toLocaleString("en-US", { notation: "compact" });
      context.fillText(text, x + step / 2, low - tall - 4);
    }
    const bound = i < bounds.length ? duration(bounds[i]) : "";
    const half = context.measureText(bound).width / 2;
    const at = x + step; // a bucket's upper bound stands at its right edge
    if (bound && at - half > free && at + half <= width) {
      context.fillText(bound, at, height - 4);
      free = at + half + 10;
    }
  }
}
