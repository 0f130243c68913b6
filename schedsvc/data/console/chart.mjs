// A line chart of two series over the last minutes, as SVG. The caption says the values in words.

const SVG = 'http://www.w3.org/2000/svg';
const HEIGHT = 140;
const LEFT = 46;
const BOTTOM = 18;
const TOP = 6;
// A page that was hidden, or had no answer, has a gap.
const GAP_MS = 5_000;
const SPAN_MIN_MS = 60_000;
const SPAN_MAX_MS = 300_000;
// The axis of time goes from 5 ms to 100 s.
const LOG_MIN = Math.log10(5);
const LOG_MAX = 5;
const TIMES = [[10, '10 ms'], [100, '100 ms'], [1_000, '1 s'], [10_000, '10 s']];

/** A figure with a caption and a chart. Values of `kind` 'time' are in ms, on a scale of tens. */
export class Chart {
  constructor(title, names, kind, write) {
    this.kind = kind;
    this.write = write;
    this.points = [];
    this.figure = document.createElement('figure');
    const caption = document.createElement('figcaption');
    const head = document.createElement('b');
    head.textContent = title;
    caption.append(head, document.createElement('br'));
    this.keys = names.map((name, i) => {
      const key = document.createElement('span');
      key.className = i ? 'key second' : 'key';
      caption.append(key);
      return { key, name };
    });
    this.area = document.createElement('div');
    this.area.className = 'chart';
    this.figure.append(caption, this.area);
    this.title = title;
    new ResizeObserver(() => this.draw()).observe(this.area);
  }

  /** Show points: a time and the values of both series; null is a gap. */
  show(points) {
    const end = points.at(-1)?.[0] ?? 0;
    this.points = points.filter(([at]) => at >= end - SPAN_MAX_MS);
    const last = this.points.at(-1)?.[1] ?? [null, null];
    for (const [i, { key, name }] of this.keys.entries()) {
      key.textContent = `${name} ${this.write(last[i])}`;
    }
    this.draw();
  }

  draw() {
    const width = this.area.clientWidth;
    if (!width || !this.points.length) return;
    const end = this.points.at(-1)[0];
    const span = Math.min(SPAN_MAX_MS, Math.max(SPAN_MIN_MS, end - this.points[0][0]));
    const x = (at) => LEFT + (width - LEFT - 2) * (1 - (end - at) / span);
    const { ticks, place } = this.kind === 'time' ? timeScale() : countScale(this.points);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - place(value));
    const svg = element('svg', { width, height: HEIGHT, role: 'img' });
    const said = this.keys.map(({ key }) => key.textContent).join(', ');
    svg.setAttribute('aria-label', `${this.title}: ${said}, now`);
    for (const [value, label] of ticks) {
      svg.append(element('line', { x1: LEFT, x2: width, y1: y(value), y2: y(value) }));
      svg.append(text(label, { x: LEFT - 6, y: y(value) + 4, 'text-anchor': 'end' }));
    }
    const minutes = Math.round(span / 60_000 * 10) / 10;
    svg.append(text(`−${minutes} min`, { x: LEFT, y: HEIGHT - 3 }));
    svg.append(text('now', { x: width - 2, y: HEIGHT - 3, 'text-anchor': 'end' }));
    for (const i of [1, 0]) {
      svg.append(element('path', { d: pathOf(this.points, i, x, y), class: i ? 'second' : '' }));
    }
    this.area.replaceChildren(svg);
  }
}

function pathOf(points, series, x, y) {
  let path = '', pen = false, last = 0;
  for (const [at, values] of points) {
    const value = values[series];
    if (value === null || at - last > GAP_MS) pen = false;
    last = at;
    if (value === null) continue;
    const place = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    // A value between two gaps is a short stroke, else it would not be seen.
    path += pen ? `L${place}` : `M${place}h1`;
    pen = true;
  }
  return path;
}

function timeScale() {
  const place = (ms) => {
    const at = Math.log10(Math.min(Math.max(ms, 5), 100_000));
    return (at - LOG_MIN) / (LOG_MAX - LOG_MIN);
  };
  return { ticks: TIMES, place };
}

function countScale(points) {
  const most = Math.max(4, ...points.flatMap(([, values]) => values.map((value) => value ?? 0)));
  const size = 10 ** Math.floor(Math.log10(most));
  const top = [1, 2, 4, 10].map((step) => step * size).find((value) => value >= most);
  const label = (value) => (value >= 10_000 ? `${value / 1_000}k` : `${value}`);
  const ticks = [0, top / 2, top].map((value) => [value, label(value)]);
  return { ticks, place: (value) => value / top };
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function text(content, attributes) {
  const made = element('text', attributes);
  made.textContent = content;
  return made;
}
