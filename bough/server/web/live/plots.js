/** Small plots of what the server does: reuse, first tokens, bytes by tier, lanes. Each says its gist in words, too. */

import { writeBytes } from "../chat/figures.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact-htm.js";
import uPlot from "../vendor/uplot.js";
import { bytesSeries, firstTokenSeries, laneSeries, median, reuseSeries, shareReused, tiersOf } from "./history.js";
import { formatCount, formatSeconds } from "./icicle/labels.js";

const HEIGHT_PX = 96;

/** All plots of one model; `theme` is anything that changes with the colours. */
export function Plots({ history, figures, theme }) {
  const { requests, samples } = history;
  const specs = [reusePlot(requests), firstTokenPlot(requests), bytesPlot(samples), lanesPlot(samples, figures)];
  return html`<div class="plots">
    ${specs.map((spec) => html`<${Plot} key=${spec.title} ...${spec} version=${history.version} theme=${theme} />`)}
  </div>`;
}

function reusePlot(requests) {
  const share = shareReused(requests);
  const lastOnes = requests.length === 1 ? "the last request" : `the last ${requests.length} requests`;
  return {
    title: "Reused of each prompt",
    data: reuseSeries(requests),
    series: [{ label: "reused", colour: "--tier-device", shape: "bars" }],
    format: (value) => `${Math.round(value)} %`,
    range: [0, 100],
    summary:
      share === null
        ? "No request has ended yet."
        : `${Math.round(100 * share)} % of the prompt tokens of ${lastOnes} were reused.`,
  };
}

function firstTokenPlot(requests) {
  const with_s = median(requests.map((each) => each.first_token_s));
  const without_s = median(requests.map((each) => each.without_s));
  const estimate = without_s === null ? "" : ` Without reuse it would be about ${formatSeconds(without_s)}.`;
  return {
    title: "Time to the first token",
    data: firstTokenSeries(requests),
    series: [
      { label: "measured", colour: "--accent", shape: "points" },
      { label: "without reuse (estimate)", colour: "--muted", shape: "rings" },
    ],
    isLog: true,
    format: formatSeconds,
    summary:
      with_s === null
        ? "No request has ended yet."
        : `The median first token came after ${formatSeconds(with_s)}.${estimate}`,
  };
}

function bytesPlot(samples) {
  const tiers = tiersOf(samples);
  const newest = samples.at(-1)?.figures.tiers ?? {};
  const parts = tiers.map((tier) => {
    const { bytes, budget_bytes } = newest[tier];
    return `${tier} ${writeBytes(bytes)}${budget_bytes ? ` of ${writeBytes(budget_bytes)}` : ""}`;
  });
  return {
    title: "Memory by tier",
    isTime: true,
    data: bytesSeries(samples),
    series: tiers.map((tier) => ({
      label: tier,
      colour: `--tier-${tier}`,
      shape: "steps",
      budget: newest[tier].budget_bytes,
    })),
    incrs: Array.from({ length: 40 }, (_, power) => 2 ** power),
    format: writeBytes,
    summary: parts.length ? `${parts.join(", ")}.` : "Nothing was told yet.",
  };
}

function lanesPlot(samples, figures) {
  const { lanes, busy_lanes, queue } = figures ?? {};
  return {
    title: "Busy lanes and queue",
    isTime: true,
    data: laneSeries(samples),
    series: [
      { label: "busy lanes", colour: "--tier-lane", shape: "steps", isFilled: true },
      { label: "waiting", colour: "--error", shape: "steps", isDashed: true },
    ],
    format: (value) => formatCount(Math.round(value)),
    range: [0, Math.max(1, lanes ?? 1, ...laneSeries(samples)[2].map((each) => each ?? 0))],
    summary:
      lanes === undefined
        ? "Not told to this key."
        : `${busy_lanes} of ${count(lanes, "lane")} busy, ${count(queue, "request")} waiting.`,
  };
}

function count(number, noun) {
  return `${formatCount(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** One plot. It is made anew when its series, its width or the colours change, else it gets new data. */
function Plot({ title, data, series, format, range, incrs, isTime = false, isLog = false, summary, version, theme }) {
  const host = useRef(null);
  const plot = useRef(null);
  const [width, setWidth] = useState(0);
  const spec = useRef(null);
  spec.current = { series, format, range, incrs, isTime, isLog };
  const isEmpty = data[0].length === 0;
  const names = series.map((each) => each.label).join();

  useEffect(() => {
    const resizes = new ResizeObserver(() => setWidth(Math.floor(host.current.clientWidth)));
    resizes.observe(host.current);
    return () => resizes.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (width < 40 || isEmpty) return undefined;
    plot.current = new uPlot(makeOptions(spec, width, host.current), data, host.current);
    return () => (plot.current.destroy(), (plot.current = null));
  }, [width, names, theme, isEmpty]);
  useLayoutEffect(() => plot.current?.setData(data), [version]);

  return html`<figure class="plot">
    <figcaption><strong>${title}</strong> <span class="plot-summary">${summary}</span></figcaption>
    <div class=${`plot-canvas ${isEmpty ? "is-empty" : ""}`} ref=${host} aria-hidden="true"></div>
    ${
      series.length > 1 &&
      !isEmpty &&
      html`<ul class="plot-legend" aria-hidden="true">
        ${series.map((each) => html`<${LegendLine} key=${each.label} ...${each} />`)}
      </ul>`
    }
  </figure>`;
}

function LegendLine({ label, colour, shape, isDashed }) {
  const style = { borderColor: `var(${colour})` };
  return html`<li class=${isDashed || shape === "rings" ? "is-dashed" : ""} style=${style}>${label}</li>`;
}

function makeOptions(spec, width, element) {
  const { series, isTime, isLog, incrs } = spec.current;
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(name).trim();
  const axis = {
    stroke: read("--muted"),
    grid: { stroke: read("--border"), width: 1 },
    ticks: { show: false },
    font: `10px ${style.fontFamily}`,
  };
  return {
    width,
    height: HEIGHT_PX,
    padding: [6, 8, 0, 0],
    legend: { show: false },
    cursor: { show: false },
    scales: {
      x: { time: isTime, range: (plot) => spanOf(plot.data[0], isTime) },
      y: { distr: isLog ? 3 : 1, range: (_, least, most) => rangeOf(spec.current, least, most) },
    },
    axes: [
      {
        ...axis,
        size: 18,
        gap: 2,
        space: 70,
        grid: { show: false },
        ...(isTime ? { values: (_, times) => times.map(formatTime) } : { incrs: [1, 2, 5, 10, 20, 50] }),
      },
      {
        ...axis,
        size: 52,
        gap: 4,
        space: 24,
        ...(isLog ? { splits: (_, __, least, most) => powersOfTen(least, most) } : { incrs }),
        values: (_, values) => values.map((each) => (each === null ? "" : spec.current.format(each))),
      },
    ],
    series: [{}, ...series.map((each) => lineOf(each, read))],
    hooks: { drawAxes: [(plot) => drawBudgets(plot, spec.current.series, read)] },
  };
}

function formatTime(time_s) {
  return new Date(1000 * time_s).toLocaleTimeString([], {
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
    hour12: false,
  });
}

function powersOfTen(least, most) {
  const first = Math.round(Math.log10(least));
  return Array.from({ length: Math.round(Math.log10(most)) - first + 1 }, (_, at) => 10 ** (first + at));
}

/** At least a minute, or ten requests. */
function spanOf(values, isTime) {
  const [least, most] = [values[0], values.at(-1)];
  return isTime ? [Math.min(least, most - 60), most] : [0.4, Math.max(10, most) + 0.6];
}

function rangeOf({ range, series, isLog }, least, most) {
  if (range) return range;
  if (isLog)
    return [
      10 ** Math.floor(Math.log10(Math.max(1e-3, least || 1e-3))),
      10 ** Math.ceil(Math.log10(Math.max(1e-2, most || 1e-2))),
    ];
  const budgets = series.map((each) => each.budget ?? 0).filter((each) => each > 0 && each < 2.5 * most);
  return [0, 1.1 * Math.max(most || 0, 1e-3, ...budgets)];
}

const SHAPES = {
  steps: () => ({ paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }),
  bars: (stroke) => ({
    paths: uPlot.paths.bars({ size: [0.7, 24] }),
    fill: `color-mix(in srgb, ${stroke} 45%, transparent)`,
    points: { show: false },
  }),
  points: (stroke) => ({ paths: () => null, points: { show: true, size: 6, fill: stroke } }),
  rings: (stroke) => ({ paths: () => null, points: { show: true, size: 6, width: 1.5, stroke, fill: "transparent" } }),
};

function lineOf({ label, colour, shape, isDashed = false, isFilled = false }, read) {
  const stroke = read(colour);
  const fill = isFilled ? `color-mix(in srgb, ${stroke} 18%, transparent)` : undefined;
  return { label, stroke, width: 1.5, fill, dash: isDashed ? [4, 3] : undefined, ...SHAPES[shape](stroke) };
}

/** A dashed line at the budget of a tier, if it is near enough to be in the plot. */
function drawBudgets(plot, series, read) {
  for (const { budget, colour } of series) {
    if (!budget || budget > plot.scales.y.max) continue;
    const y = Math.round(plot.valToPos(budget, "y", true));
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = read(colour);
    ctx.setLineDash([6, 4]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }
}
