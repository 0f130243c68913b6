// The console: asks the scheduler once a second, and shows what it answers.

import { Chart } from './chart.mjs';
import {
  History, count, duration, keyOf, percent, rate, shares, short, sum, times,
} from './figures.mjs';
import { listen } from './search.mjs';
import { Table } from './table.mjs';

const RETRY_MS = 2_000;
const RECENT_MAX = 20;
const LOADS = ['', 'underloaded', 'nearly overloaded', 'overloaded'];
const UNITS = {
  requests_per_minute: 'requests a minute',
  input_tokens_per_minute: 'input tokens a minute',
  output_tokens_per_minute: 'output tokens a minute',
  tokens_per_minute: 'tokens a minute',
  concurrent_requests: 'requests at once',
  tokens_per_day: 'tokens a day',
  tokens_per_month: 'tokens a month',
};

const at = (id) => document.getElementById(id);
const clock = (unix_ms) => new Date(unix_ms).toLocaleTimeString('en-GB');
const words = (name) => state?.words[name] ?? name.replaceAll('_', ' ');
const linkTo = (tenant) => `#tenant=${encodeURIComponent(tenant)}`;
const nameOf = (flow) => flow.tenant
  + (flow.request_class === 'default' ? '' : `, ${flow.request_class}`)
  + (flow.audit ? ' (dry run)' : '');
const number = (title, read, write = count) => ({
  title, number: true, cell: (row) => write(read(row)), sort: (row) => read(row) ?? -1,
});

let state;
const history = new History();
// The scheduler's points of the last five minutes.
let points = [];
const POINTS_MAX = 200;
// Places of the values in a point; see console_history.py.
const [QUEUED, RUNNING, WAIT_P99, WAIT_P50, FIRST_P99, FIRST_P50] = [0, 1, 2, 3, 4, 5];
// Sorted by tenant and reason, the last one at the end.
const recent = new Map();
let answered_ms = 0;

// The cells of a row of the table of tenants; see rowsOf().
const tenants = new Table(at('tenants'), [
  { title: 'tenant', sort: (row) => row.name,
    cell: (row) => (row.tenant ? { text: row.name, href: linkTo(row.tenant) } : row.name) },
  { title: 'share', sort: (row) => (row.share ?? -1) / (row.entitled || 1), cell: (row) => ({
    text: times(row.share, row.entitled),
    meter: [row.entitled === null ? null : row.share, null, row.entitled],
  }) },
  number('waiting', (row) => row.queued),
  number('running', (row) => row.live_leases),
  number('weight', (row) => row.weight, (value) => (value === null ? '' : `${value}`)),
  number('tokens/s', (row) => row.tokens_s, short),
  number('grants/s', (row) => row.grants_s, rate),
  number('refused, 1 min', (row) => row.refused),
  number('wait p50', (row) => row.wait_p50, duration),
  number('wait p99', (row) => row.wait_p99, duration),
  number('first token p99', (row) => row.ttft_p99, duration),
], (row) => row.key, 'waiting');

const waiting = new Table(at('waiting'), [
  { title: 'tenant', cell: (row) => ({ text: row.name, href: linkTo(row.tenant) }) },
  number('waiting', (row) => row.queued),
  number('oldest', (row) => row.oldest, duration),
  { title: 'why', text: true, cell: (row) => row.why },
  number('a new one waits', (row) => row.expected, duration),
  number('input tokens', (row) => row.input),
], (row) => row.key, 'waiting');

const pools = new Table(at('pools'), [
  { title: 'pool', cell: (row) => row.name },
  { title: 'state', cell: (row) => ({ text: row.state, state: row.tone }) },
  { title: 'KV promised', cell: (row) => ({
    text: promised(row.promised_tokens / Math.max(1, row.capacity_tokens))
      + `, used ${percent(row.used / Math.max(1, row.capacity_tokens))}`,
    meter: [row.promised_tokens, row.used].map((n) => n / Math.max(1, row.capacity_tokens)),
  }) },
  number('promised', (row) => row.promised_tokens),
  number('used', (row) => row.used),
  number('capacity, tokens', (row) => row.capacity_tokens),
  number('running', (row) => row.live_leases),
  number('waiting for it alone', (row) => row.queued),
  { title: 'its next request', text: true, cell: (row) => row.needs },
], (row) => row.name);

const quotas = new Table(at('quotas'), [
  { title: 'tenant or group', cell: (row) => (row.tenant
    ? { text: row.owner, href: linkTo(row.tenant) } : row.owner) },
  { title: 'used', sort: (row) => row.part, cell: (row) => ({
    text: `${percent(row.part)}${row.waits ? ', requests wait' : ''}`,
    state: row.waits ? 'warn' : '', meter: [row.part],
  }) },
  { title: 'of', cell: (row) => UNITS[row.kind] ?? words(row.kind) },
  number('left', (row) => row.remaining),
  number('limit', (row) => row.limit),
  number('full again in', (row) => row.reset_ms, (ms) => (ms > 0 ? duration(ms) : '')),
], (row) => `${row.owner}/${row.kind}`, 'used');

const reasons = new Table(at('reasons'), [
  { title: 'reason', cell: (row) => words(row.reason) },
  number('1 min', (row) => row.minute),
  number('since the start', (row) => row.total),
], (row) => row.reason, '1 min');

const refused = new Table(at('recent'), [
  { title: 'tenant', cell: (row) => (row.tenant
    ? { text: row.name, href: linkTo(row.tenant) } : row.name) },
  { title: 'reason', cell: (row) => words(row.reason) },
  number('requests', (row) => row.count),
  number('last', (row) => row.unix_ms, clock),
], (row) => row.key, 'last');

const charts = {
  requests: new Chart('Requests', ['waiting', 'running'], 'count', count),
  wait: new Chart('Queue wait of granted requests, last 15 s', ['p99', 'p50'], 'time', duration),
  ttft: new Chart('Time to first token, last 15 s', ['p99', 'p50'], 'time', duration),
};
at('charts').append(...Object.values(charts).map((chart) => chart.figure));
at('chart-tenant').addEventListener('change', () => draw());
window.addEventListener('hashchange', showLinked);
at('filter').addEventListener('input', () => showTenants());
listen(at('why'), at('why-answer'));

/** Ask, show, and ask again when there is something new to be had. A hidden page asks nothing. */
async function watch() {
  await recall();
  for (;;) {
    if (document.hidden) {
      await new Promise((wake) => {
        document.addEventListener('visibilitychange', wake, { once: true });
      });
      continue;
    }
    let wait_ms = RETRY_MS;
    try {
      const response = await fetch('state.json', { cache: 'no-store' });
      if (!response.ok) throw new Error(`status ${response.status}`);
      const state = await response.json();
      wait_ms = Number(response.headers.get('x-fresh-ms')) + 10;
      answered_ms = Date.now();
      if (state.problem) notices([['bad', `The scheduler grants nothing: ${state.problem}`]]);
      else show(state);
    } catch (error) {
      const since = answered_ms ? ` since ${clock(answered_ms)}` : '';
      notices([['bad', `No answer from the scheduler${since} (${error.message}). What is below is`
        + ' as it was then.']]);
      judge({ level: 'unknown', text: 'The figures are old: nothing is known of the time since.' });
    }
    await new Promise((wake) => { setTimeout(wake, wait_ms); });
  }
}

/** Take over what the scheduler knows of the last five minutes. */
async function recall() {
  try {
    const found = await (await fetch('history.json', { cache: 'no-store' })).json();
    points = found.points;
    if (found.before && !found.before.problem) history.add(found.before);
  } catch {
    points = [];  // the page begins with the present
  }
}

function show(found) {
  const before = history.now;
  history.add(found);
  const is_first = !state;
  state = found;
  if (before && before.incarnation !== found.incarnation) points = [];
  else if (before && before !== history.now && !is_first) remember(before, history.now);
  if (points.at(-1)?.at_ms !== found.point.at_ms) points.push(found.point);
  points = points.slice(-POINTS_MAX);
  judge(found.judgement);
  if (is_first) link();
  header();
  // The sentence at the top holds the worst of them already.
  notices(problems().filter(([, text]) => !found.judgement.text.includes(text)));
  figures();
  chooseTenants();
  draw();
  showWaiting();
  showPools();
  showTenants();
  showQuotas();
  showRefusals();
}

/** Show the sentence of the scheduler. Its word repeats what the colour says. */
function judge({ level, text }) {
  const [word, sentence] = at('judgement').children;
  if (sentence.textContent === text && word.textContent === `${level}:`) return;
  at('judgement').className = level;
  word.textContent = `${level}:`;
  sentence.textContent = text;
}

/** Let the links to documents lead there, and show the tenant that the address names. */
function link() {
  for (const found of document.querySelectorAll('a[data-docs]')) {
    found.href = state.docs + found.dataset.docs;
    found.rel = 'noreferrer';
  }
  chooseTenants();
  showLinked();
}

/** Show one tenant: in the charts, and as the only row of the table. */
function showLinked() {
  const found = /^#tenant=(.*)$/.exec(location.hash);
  if (!found || !state) return;
  const tenant = decodeURIComponent(found[1]);
  at('filter').value = tenant;
  at('chart-tenant').value = tenant in points.at(-1).of ? tenant : '';
  draw();
  showTenants();
  at('h-tenants').scrollIntoView({ block: 'start' });
}

/** Write how much of the cache is promised, and why it may be more than there is. */
function promised(part) {
  return part > 1 ? `${percent(part)} (outputs end early)` : percent(part);
}

function header() {
  const said = [work()];
  // A member that stands by decides nothing.
  if (!state.set || state.set.leads) said.push(decisions());
  said.push(`policy ${state.policy}`);
  at('state').textContent = said.join(' · ');
  const time = clock(state.unix_ms);
  at('clock').textContent = `${time}, version ${state.version}`;
}

function decisions() {
  const mode = state.mode.overlay || state.mode.configured;
  let text = mode === 'dry_run' ? 'dry run: decisions are only counted' : 'decisions are enforced';
  if (state.mode.overlay) text += ' (an operator said so)';
  if (state.mode.tenants) text += `, other for ${count(state.mode.tenants)} tenants`;
  return text;
}

/** Say what the scheduler does, and as a member of a set, whether it leads. */
function work() {
  const { set } = state;
  if (set && !set.leads) return `stands by for the set ${set.name}`;
  const done = state.draining ? 'draining' : 'serving';
  return set ? `${done}, leads the set ${set.name} in term ${count(set.term)}` : done;
}

function problemsOfSet({ leads, leader, target, followers, problem }) {
  const found = [];
  if (!leads && leader) {
    found.push(['', 'This scheduler stands by and grants nothing: the member'
      + ` ${leader} leads, at ${target}.`]);
  } else if (!leads) {
    found.push(['bad', 'This scheduler stands by, and no leader is known: nothing is granted.']);
  } else if (!followers.length) {
    found.push(['', 'No member follows this leader: if it ends now, no other continues from it.']);
  }
  if (problem) found.push(['bad', `The store of the cluster cannot be asked: ${problem}`]);
  return found;
}

function problems() {
  const found = state.set ? problemsOfSet(state.set) : [];
  if (state.draining) found.push(['', 'The scheduler drains: new requests are refused.']);
  const drained = state.pools.filter((pool) => pool.draining && !state.draining);
  for (const pool of drained) found.push(['', `Pool ${pool.name} is drained by an operator.`]);
  if (state.config.problem) {
    found.push(['bad', `The last reload changed nothing: ${state.config.problem}`]);
  }
  if (state.config.needs_restart.length) {
    found.push(['', `Wait for a restart: ${state.config.needs_restart.join(', ')}`]);
  }
  if (state.state_problem) {
    found.push(['bad', `The state file cannot be written: ${state.state_problem}`]);
  }
  return found;
}

/** Show these notices. A reader is told only of a change. */
function notices(found) {
  const shown = [...at('notices').children].map((notice) => notice.textContent);
  if (shown.length === found.length && found.every(([, text], i) => text === shown[i])) return;
  at('notices').replaceChildren(...found.map(([tone, text]) => {
    const made = document.createElement('p');
    made.className = `notice ${tone}`;
    made.textContent = text;
    return made;
  }));
}

function figures() {
  const { totals, flows } = state;
  const oldest = Math.max(0, ...flows.map((flow) => flow.oldest_queued_ms));
  const refused_s = history.rate((sample) => sum(refusalsOf(sample)));
  const tokens_s = history.rate((sample) => [...sample.flows.values()].reduce(
    (all, flow) => all + flow.input_tokens + flow.output_tokens, 0,
  ));
  const values = {
    waiting: [count(totals.queued), ''],
    'oldest wait': [totals.queued ? duration(oldest) : '–', ''],
    running: [count(totals.live_leases), ''],
    granted: [rate(history.rate((sample) => sample.totals.granted)), '/s'],
    refused: [rate(refused_s), '/s'],
    tokens: [short(tokens_s), '/s'],
    'fairness gap': [short(totals.fairness_gap_micro / 1e6),
      ` of ${short(totals.fairness_bound_micro / 1e6)}`],
  };
  const list = at('figures');
  if (!list.children.length) {
    for (const name of Object.keys(values)) {
      const pair = list.appendChild(document.createElement('div'));
      pair.appendChild(document.createElement('dt')).textContent = name;
      const value = pair.appendChild(document.createElement('dd'));
      value.append(document.createElement('span'), document.createElement('small'));
    }
  }
  for (const [i, [value, unit]] of Object.values(values).entries()) {
    const [number_, small] = list.children[i].lastChild.children;
    number_.textContent = value;
    small.textContent = unit;
  }
}

function refusalsOf(sample) {
  const found = { ...sample.totals.refusals };
  for (const flow of sample.flows.values()) {
    for (const [reason, n] of Object.entries(flow.refusals)) {
      found[reason] = (found[reason] ?? 0) + n;
    }
  }
  return found;
}

function chooseTenants() {
  const select = at('chart-tenant');
  const names = Object.keys(state.point.of).filter(Boolean);
  const shown = [...select.options].slice(1).map((option) => option.value);
  if (names.length === shown.length && names.every((name, i) => name === shown[i])) return;
  const chosen = select.value;
  select.replaceChildren(select.options[0], ...names.map((name) => new Option(name, name)));
  select.value = names.includes(chosen) ? chosen : '';
}

function draw() {
  const tenant = at('chart-tenant').value;
  const pick = (...places) => points.map(({ at_ms, of }) => (
    [at_ms, places.map((place) => of[tenant]?.[place] ?? null)]));
  charts.requests.show(pick(QUEUED, RUNNING));
  charts.wait.show(pick(WAIT_P99, WAIT_P50));
  charts.ttft.show(pick(FIRST_P99, FIRST_P50));
}

function showWaiting() {
  const full = state.pools.filter((pool) => pool.needs);
  const rows = state.flows.filter((flow) => flow.queued).map((flow) => ({
    key: keyOf(flow), name: nameOf(flow), tenant: flow.tenant, queued: flow.queued,
    oldest: flow.oldest_queued_ms,
    expected: flow.wait_expected_ms, input: flow.queued_input_tokens, why: whyOf(flow, full),
  }));
  at('waiting-none').hidden = rows.length > 0;
  waiting.fill(rows);
}

function whyOf(flow, full) {
  if (flow.waits_for_quota) return 'A quota of its tenant, or of a group above, is used up.';
  if (flow.held_to_share) return 'It is beyond its share while shares bind.';
  const pools = full.map((pool) => ` Pool ${pool.name} ${pool.needs}.`);
  return `Its turn${pools.length ? ', or room.' : '.'}${pools.join('')}`;
}

function showPools() {
  const rows = state.pools.map((pool) => {
    const fresh = pool.telemetry_age_ms >= 0;
    const said = [pool.draining ? 'drained' : LOADS[pool.overload_state]];
    if (!pool.attached) said[0] = `detached for ${duration(pool.detached_ms)}`;
    if (!pool.attached && pool.draining) said.push('drained');
    if (pool.suspect_leases) said.push(`${count(pool.suspect_leases)} leases overdue`);
    const bad = !pool.attached || pool.overload_state === 3;
    return {
      ...pool,
      state: said.filter(Boolean).join(', '),
      tone: bad ? 'bad' : pool.draining ? 'warn' : '',
      // The engine's own figures, else those that callers have reported.
      used: fresh ? pool.engine_used_tokens : pool.posted_tokens,
      needs: pool.needs ? `The pool ${pool.needs}.` : '',
    };
  });
  at('pools-none').hidden = rows.length > 0;
  pools.fill(rows);
}

function showTenants() {
  if (!state) return;
  const wanted = at('filter').value.trim().toLowerCase();
  const parts = shares(history);
  const rows = state.flows.filter((flow) => nameOf(flow).toLowerCase().includes(wanted)).map(
    (flow) => rowOf(flow, parts.get(keyOf(flow))),
  );
  const found = rows.length;
  if (state.other && !wanted) {
    rows.push({
      key: 'other', last: true, name: `${count(state.other.flows)} others`, share: null,
      entitled: null, weight: null, queued: state.other.queued,
      live_leases: state.other.live_leases, tokens_s: null, grants_s: null, refused: null,
      wait_p50: null, wait_p99: null, ttft_p99: null,
    });
  }
  tenants.fill(rows);
  const left = state.flows.length - found;
  const said = [];
  if (state.other) {
    said.push(`${count(state.flows.length)} tenants have rows: those that wait first, then those`
      + ' that were served most. Shares are among these.');
  }
  if (left) said.push(`The filter hides ${count(left)}.`);
  at('tenants-more').textContent = said.join(' ');
}

function rowOf(flow, { share, entitled }) {
  const key = keyOf(flow);
  const own = state.point.of[flow.tenant] ?? [];
  return {
    key, name: nameOf(flow), tenant: flow.tenant, share, entitled,
    weight: flow.weight_milli / 1_000,
    queued: flow.queued, live_leases: flow.live_leases,
    tokens_s: history.each_s(key, (row) => row.input_tokens + row.output_tokens),
    grants_s: history.each_s(key, (row) => row.granted),
    refused: history.growth(key, (row) => sum(row.refusals)),
    wait_p50: own[WAIT_P50] ?? null, wait_p99: own[WAIT_P99] ?? null,
    ttft_p99: own[FIRST_P99] ?? null,
  };
}

function showQuotas() {
  const rows = [];
  const add = (owner, tenant, limit, waits) => rows.push({
    ...limit, owner, tenant, waits,
    part: (limit.limit - limit.remaining) / Math.max(1, limit.limit),
  });
  for (const entry of state.quotas) {
    const owner = entry.name.replace(':', ' ');
    for (const limit of entry.limits) add(owner, '', limit, entry.waiting > 0);
  }
  for (const flow of state.flows) {
    for (const limit of flow.quotas) {
      const spent = limit.remaining <= Math.min(...flow.quotas.map((other) => other.remaining));
      add(nameOf(flow), flow.tenant, limit, flow.waits_for_quota && spent);
    }
  }
  at('quotas-none').hidden = rows.length > 0;
  quotas.fill(rows);
}

function showRefusals() {
  const now = refusalsOf(history.now), before = refusalsOf(history.since());
  const rows = Object.entries(now).map(([reason, total]) => ({
    reason, total, minute: Math.max(0, total - (before[reason] ?? 0)),
  }));
  at('reasons-none').hidden = rows.length > 0;
  reasons.fill(rows);
  at('recent-none').hidden = recent.size > 0;
  refused.fill([...recent.values()]);
}

/** Keep which tenant was refused how many requests, why, and when last. */
function remember(before, now) {
  const note = (name, tenant, after, was) => {
    for (const [reason, total] of Object.entries(after)) {
      const more = total - (was[reason] ?? 0);
      if (more <= 0) continue;
      const key = JSON.stringify([name, reason]);
      const row = recent.get(key) ?? { key, name, tenant, reason, count: 0 };
      recent.delete(key);
      recent.set(key, { ...row, count: row.count + more, unix_ms: state.unix_ms });
    }
  };
  for (const [key, flow] of now.flows) {
    const was = before.flows.get(key);
    if (was) note(nameOf(flow), flow.tenant, flow.refusals, was.refusals);
  }
  note('(no tenant)', '', now.totals.refusals, before.totals.refusals);
  while (recent.size > RECENT_MAX) recent.delete(recent.keys().next().value);
}

watch();
