// Numbers of the console: rates from counters, and how numbers are written.
// Nothing here touches the page.

const RATE_MS = 60_000;

/** Samples of the last minute, and what can be said of the time between two of them. */
export class History {
  constructor() {
    this.samples = [];
  }

  /** Add a document. One of another process of the scheduler begins a new history. */
  add(state) {
    const last = this.samples.at(-1);
    if (last && (last.incarnation !== state.incarnation || last.now_ms > state.now_ms)) {
      this.samples = [];
    }
    if (last && last.now_ms === state.now_ms) return;
    const flows = new Map(state.flows.map((flow) => [keyOf(flow), flow]));
    const { incarnation, now_ms, totals, prices } = state;
    this.samples.push({ incarnation, now_ms, totals, prices, flows });
    while (this.samples[1]?.now_ms <= now_ms - RATE_MS) this.samples.shift();
  }

  get now() {
    return this.samples.at(-1);
  }

  /** The latest sample that is at least `ms` old, else the oldest. */
  since(ms = RATE_MS) {
    const end_ms = this.now.now_ms - ms;
    return this.samples.findLast((sample) => sample.now_ms <= end_ms) ?? this.samples[0];
  }

  /** How much `read(sample)` grew in the last `ms`, for each second; null: not known yet. */
  rate(read, ms = 10_000) {
    const before = this.since(ms);
    const seconds = (this.now.now_ms - before.now_ms) / 1_000;
    return seconds > 0 ? (read(this.now) - read(before)) / seconds : null;
  }

  /** How much a counter of a flow grew in the last minute. A flow that was not shown counts 0. */
  growth(key, read) {
    const [now, before] = [this.now.flows.get(key), this.since().flows.get(key)];
    return now && before ? Math.max(0, read(now) - read(before)) : 0;
  }

  /** How much a counter of a flow grew in a second of the last minute; null: not known yet. */
  each_s(key, read) {
    const seconds = (this.now.now_ms - this.since().now_ms) / 1_000;
    return seconds > 0 ? this.growth(key, read) / seconds : null;
  }

  /** Tokens that a flow was served in the last minute, as the policy charges them. */
  served(key) {
    const price = this.now.prices;
    return this.growth(key, (flow) =>
      (flow.input_tokens - flow.cached_input_tokens) * price.input
      + flow.cached_input_tokens * price.cached + flow.output_tokens * price.output
      + flow.kv_token_steps * price.kv);
  }
}

/** Names a flow: a tenant in a class. */
export function keyOf(flow) {
  return JSON.stringify([flow.tenant, flow.request_class]);
}

/** Each flow's part of what its class was served, and the part of that which it is due. */
export function shares(history) {
  const classes = new Map();
  const rows = new Map();
  for (const [key, flow] of history.now.flows) {
    const served = history.served(key);
    const sums = classes.get(flow.request_class) ?? { served: 0, entitled: 0 };
    sums.served += served;
    sums.entitled += flow.entitled_ppm;
    classes.set(flow.request_class, sums);
    rows.set(key, { served, flow });
  }
  const found = new Map();
  for (const [key, { served, flow }] of rows) {
    const sums = classes.get(flow.request_class);
    found.set(key, {
      share: sums.served > 0 ? served / sums.served : null,
      entitled: flow.entitled_ppm ? flow.entitled_ppm / sums.entitled : null,
    });
  }
  return found;
}

export const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat('en', { maximumFractionDigits: 1, minimumFractionDigits: 1 });

/** Write a number with thousands apart; null is a dash. */
export function count(value) {
  return value === null || value === undefined ? '–' : whole.format(value);
}

/** Write a rate: one decimal below 10. */
export function rate(value) {
  if (value === null) return '–';
  return value > 0 && value < 10 ? tenths.format(value) : whole.format(value);
}

/** Write a share in percent; `null` is a dash. */
export function percent(part) {
  return part === null ? '–' : `${whole.format(part * 100)} %`;
}

/** Write a part of a share as a multiple of it: 4.0 × its share; `null` is a dash. */
export function times(share, entitled) {
  return share === null || !entitled ? '–' : `${tenths.format(share / entitled)} × its share`;
}

/** Write a duration with its unit; null is a dash. */
export function duration(ms) {
  if (ms === null || ms < 0) return '–';
  if (ms < 1_000) return `${whole.format(ms)} ms`;
  if (ms < 120_000) return `${tenths.format(ms / 1_000)} s`;
  return ms < 7_200_000 ? `${whole.format(ms / 60_000)} min` : `${whole.format(ms / 3_600_000)} h`;
}

/** Write a large number short: 12.3k, 4.5M. */
export function short(value) {
  if (value === null) return '–';
  for (const [size, unit] of [[1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (Math.abs(value) >= 10 * size || (size > 1e3 && Math.abs(value) >= size)) {
      return `${tenths.format(value / size)}${unit}`;
    }
  }
  return rate(value);
}
