// Draws the charts of a page out of the numbers that stand in it, with uPlot. Without scripts each chart has its
// newest and best values. Runs in the reader's browser; asks nothing of any server.
/* global uPlot */
"use strict";

const HEIGHT = 220;
const MARKED_POINTS = 50;  // lines up to this long show their points
const wide = new Intl.NumberFormat("en", {maximumSignificantDigits: 5});
const compact = new Intl.NumberFormat("en", {maximumSignificantDigits: 4, notation: "compact"});

function shown(value, format = wide) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e15) ? value.toExponential(format === wide ? 3 : 0) : format.format(value);
}

function colour(figure, name) {
  return getComputedStyle(figure).getPropertyValue(name).trim();
}

// The lines side by side at the x of all of them, as uPlot wants them.
function aligned(lines) {
  return uPlot.join(lines.map(line => [line.x, line.y]));
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.box = figure.querySelector(".dpt-plot");
    this.given = JSON.parse(figure.querySelector("script").textContent);
    this.isLog = this.given.log;
    this.buttons = [...figure.querySelectorAll(".dpt-legend button")];
    this.values = [...figure.querySelectorAll(".dpt-legend b")];
    this.newest = this.values.map(value => value.textContent);
    this.isOff = this.buttons.map(() => false);
    this.index = null;
    this.buttons.forEach((button, i) => button.addEventListener("click", () => this.toggle(i)));
    this.addScaleButton();
    this.box.addEventListener("keydown", event => this.step(event));
    this.box.append(document.createElement("span"));  // an empty box takes no room
    new ResizeObserver(() => this.fit()).observe(this.box);  // also when a tab or a part is opened that was closed
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  addScaleButton() {
    if (!this.given.positive) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "dpt-scale";
    button.textContent = "log";
    button.setAttribute("aria-label", `logarithmic scale of ${this.given.title}`);
    button.setAttribute("aria-pressed", this.isLog);
    button.addEventListener("click", () => {
      this.isLog = !this.isLog;
      button.setAttribute("aria-pressed", this.isLog);
      this.draw();
    });
    this.figure.querySelector("header").append(button);
  }

  fit() {
    const width = this.box.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.setSize({width, height: HEIGHT});
    else this.draw();
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.destroy();
    this.box.replaceChildren();
    this.plot = new uPlot(this.options(width), aligned(this.given.lines), this.box);
  }

  options(width) {
    const [ink, line] = [colour(this.figure, "--soft"), colour(this.figure, "--line")];
    const axis = {stroke: ink, font: "11px system-ui, sans-serif", grid: {stroke: line, width: 1}, ticks: {show: false}};
    const isFromZero = this.given.from_zero && !this.isLog;
    return {
      width,
      height: HEIGHT,
      padding: [10, 14, 0, 0],
      scales: {x: {time: false, range: spread}, y: {distr: this.isLog ? 3 : 1, range: isFromZero ? upwards : undefined}},
      axes: [
        {...axis, grid: {show: false}, size: 30, gap: 4, values: (_, ticks) => ticks.map(tick => shown(tick, compact)),
         incrs: this.given.whole ? WHOLE : undefined},
        {...axis, grid: {...axis.grid, filter: (_, ticks) => this.isLog ? sparse(ticks) : ticks}, size: 54, gap: 6, values: (_, ticks) => ticks.map(tick => tick === null ? "" : shown(tick, compact))},
      ],
      series: [{}, ...this.given.lines.map((line, i) => this.series(line, i))],
      legend: {show: false},
      cursor: {y: false, points: {size: 8, width: 2}, sync: {key: `dpt-${this.given.x_label}`, scales: ["x", null]}},
      hooks: {setCursor: [plot => this.tell(plot.cursor.idx)], draw: [plot => this.mark(plot)]},
    };
  }

  series(line, i) {
    const stroke = colour(this.figure, `--c${line.colour}`);
    return {label: line.name, stroke, width: 1.75, spanGaps: true, show: !this.isOff[i],
            dash: line.dashed ? [5, 4] : undefined,
            points: {show: line.x.length <= MARKED_POINTS, size: 5, fill: stroke}};
  }

  // Vertical lines at what happened, and rings around the best values.
  mark(plot) {
    const {ctx, bbox} = plot;
    ctx.save();
    ctx.strokeStyle = colour(this.figure, "--warn");
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.lineWidth = devicePixelRatio;
    for (const {x} of this.given.marks) {
      const left = plot.valToPos(x, "x", true);
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    ctx.lineWidth = 2 * devicePixelRatio;
    this.given.lines.forEach((line, i) => {
      if (!line.best || this.isOff[i]) return;
      ctx.strokeStyle = colour(this.figure, `--c${line.colour}`);
      ctx.fillStyle = colour(this.figure, "--card");
      ctx.beginPath();
      ctx.arc(plot.valToPos(line.best[0], "x", true), plot.valToPos(line.best[1], "y", true), 4.5 * devicePixelRatio, 0, 7);
      ctx.fill();
      ctx.stroke();
    });
    ctx.restore();
  }

  // In the legend, the values at the cursor: of each line the last one up to there.
  tell(index) {
    this.index = index;
    this.values.forEach((value, i) => {
      if (index === null || index === undefined) {
        value.textContent = this.newest[i];
        return;
      }
      const [xs, ys] = [this.plot.data[0], this.plot.data[i + 1]];
      let last = index;
      while (last > 0 && (ys[last] === null || ys[last] === undefined)) last -= 1;
      value.textContent = `${shown(ys[last])} at ${shown(xs[last])}`;
    });
  }

  toggle(i) {
    this.isOff[i] = !this.isOff[i];
    this.buttons[i].setAttribute("aria-pressed", !this.isOff[i]);
    if (this.plot) this.plot.setSeries(i + 1, {show: !this.isOff[i]});
  }

  // The arrow keys move the cursor.
  step(event) {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by || !this.plot) return;
    event.preventDefault();
    const xs = this.plot.data[0];
    const index = Math.min(xs.length - 1, Math.max(0, (this.index ?? (by > 0 ? -1 : xs.length)) + by));
    this.plot.setCursor({left: this.plot.valToPos(xs[index], "x"), top: 10});
    this.figure.querySelector(".dpt-legend").setAttribute("aria-live", "polite");  // and a screen reader says the values
  }
}

const WHOLE = [1, 2, 5].flatMap(n => Array.from({length: 15}, (_, power) => n * 10 ** power)).sort((a, b) => a - b);

// On a logarithmic axis of many decades, lines at the powers of ten alone; the others are no line.
function sparse(ticks) {
  const isPower = tick => Number.isInteger(Math.round(1e6 * Math.log10(tick)) / 1e6);
  return ticks.length <= 20 ? ticks : ticks.map(tick => isPower(tick) ? tick : null);
}

// A single x gets room on both sides: uPlot would begin the axis with it.
function spread(plot, low, high) {
  const [only, ...others] = plot.data[0];
  return only !== undefined && !others.length ? [only - 1, only + 1] : [low, high];
}

function upwards(_, low, high) {
  return [0, high > 0 ? high * 1.08 : 1];
}

function drawAll() {
  for (const figure of document.querySelectorAll(".dpt-chart:not([data-drawn])")) {
    figure.dataset.drawn = "";
    new Chart(figure);
  }
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", drawAll);
else setTimeout(drawAll);
