// Tests of the client with several targets: node --test failover.test.mjs

import assert from 'node:assert/strict';
import { afterEach, beforeEach, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { Scheduler } from 'schedsvc';
import { delayed, FakeScheduler, grant, status } from 'schedsvc/testing';
import { Fence, fenceOf, JITTER_MS, NAMED_JITTER_MS, Targets } from '../dist/targets.js';

const request = { tenant: 'red', inputTokens: [100], maxOutputTokens: 20 };

/** A scheduler that grants its own lease. */
class Leader extends FakeScheduler {
  constructor(leaseId) {
    super();
    this.decide = () => grant({ leaseId });
  }

  get terms() {
    return this.calls.map(({ metadata }) => metadata['schedsvc-term']);
  }

  get reports() {
    return this.calls.filter(({ method }) => method === 'Progress').length;
  }
}

let a;
let b;
let scheduler;

function client(options) {
  scheduler = new Scheduler(`${a.target},${b.target}`, options);
  return scheduler;
}

beforeEach(async () => {
  a = new Leader('1');
  b = new Leader('2');
  await Promise.all([a.start(), b.start()]);
});

afterEach(async () => {
  a.stop();
  b.stop();
  await scheduler?.close();
});

test('a call goes to the next target where the first is away', async () => {
  a.stop();
  const admission = await client().admit(request);
  assert.equal(admission.leaseId, '2');
  assert.equal((await admission.complete()).outcome, 'OUTCOME_COMPLETED');
});

test('a held call moves on with its request id', async () => {
  a.hangs = true;
  const asking = client({ silentAfterMs: 60_000 }).admit(request);
  while (a.requests.length === 0) await new Promise(setImmediate);
  a.stop();
  const admission = await asking;
  assert.equal(admission.leaseId, '2');
  assert.equal(a.requests[0].requestId, b.requests[0].requestId);
  await admission.cancel();
});

test('a silent scheduler is left for the next', async () => {
  a.hangs = true;
  const admission = await client({ silentAfterMs: 150 }).admit(request);
  assert.equal(admission.leaseId, '2');
  await admission.cancel();
});

test('a held call stays with a scheduler that answers probes', async () => {
  a.script(delayed(Infinity));
  const asking = client({ silentAfterMs: 900 }).admit(request);
  while (a.reports < 5) await sleep(10);
  a.release(a.requests[0].requestId, grant({ leaseId: '9' }));
  const admission = await asking;
  assert.equal(admission.leaseId, '9');
  await admission.cancel();
});

test('pauses are shorter after the leader is named', () => {
  const targets = new Targets('a:1,b:1');
  assert.equal(targets.pauseMsMax(1_000), JITTER_MS);
  targets.moveOn('a:1', 'b:1', { nowMs: 1_000 });
  assert.equal(targets.pauseMsMax(1_499), NAMED_JITTER_MS);
  assert.equal(targets.pauseMsMax(1_500), JITTER_MS);
  targets.answered();
  // A standby names a dead leader for as long as its term lasts.
  targets.moveOn('b:1', undefined, { nowMs: 1_600 });
  targets.answered();
  targets.moveOn('a:1', 'b:1', { nowMs: 1_700 });
  assert.equal(targets.current, 'b:1');
  assert.equal(targets.pauseMsMax(1_700), JITTER_MS);
  targets.answered();
  targets.moveOn('b:1', 'evil:6', { nowMs: 9_000 });
  assert.equal(targets.pauseMsMax(9_000), JITTER_MS);
});

test('the named leader is asked, if it is in the list', async () => {
  a.leader = b.target;
  await client().stats();
  assert.equal(b.terms.length, 1);
  assert.equal(a.terms.length, 1);
  b.leader = '192.0.2.1:7600';
  a.leader = undefined;
  await scheduler.stats();
  assert.equal(a.terms.length, 2);
});

for (const [name, leadership] of [
  ['a lower term', { term: '4', leader: 'b/1' }],
  ['an equal term of another leader', { term: '5', leader: 'b/1' }],
  ['no term', null],
]) {
  test(`a grant under ${name} is dropped`, async () => {
    a.leadership = { term: '5', leader: 'a/1' };
    b.leadership = leadership;
    const first = await client({ failoverWaitMs: 300 }).admit(request);
    await first.complete();
    a.leader = b.target;
    await assert.rejects(scheduler.admit(request), { name: 'CallFailed', code: 14 });
    assert.ok(b.requests.length > 0);
    assert.equal(b.terms[0], '5');
    b.leadership = { term: '6', leader: 'b/2' };
    const next = await scheduler.admit(request);
    assert.equal(next.leaseId, '2');
    await next.complete();
  });
}

for (const [name, leadership] of [
  ['a lower term', { term: '4', leader: 'b/1' }],
  ['an equal term of another leader', { term: '5', leader: 'b/1' }],
  ['no term', null],
]) {
  test(`the state and the end of a lease under ${name} have no effect`, async () => {
    Object.assign(a, { leadership: { term: '5', leader: 'a/1' }, ttlMs: 60 });
    b.leadership = leadership;
    const admission = await client({ failoverWaitMs: 60_000 }).admit(request);
    const lease = a.leases.get('1');
    const stale = { ...lease, state: 'LEASE_STATE_VOID', reports: [], ends: [] };
    b.leases.set('1', stale);
    a.leader = b.target;
    while (stale.reports.length < 2) await sleep(5);
    assert.equal(admission.signal.aborted, false);
    const ending = admission.complete();
    while (stale.ends.length < 2) await sleep(5);
    assert.equal(lease.ends.length, 0);
    a.leader = undefined;
    assert.equal((await ending).outcome, 'OUTCOME_COMPLETED');
    assert.equal(lease.ends.length, 1);
  });
}

test('an answer about the caller is final', async () => {
  a.fail('Stats', status.UNAUTHENTICATED);
  await assert.rejects(client().stats(), { name: 'CallFailed', code: 16 });
  assert.equal(b.terms.length, 0);
});

test('retries end with the deadline', async () => {
  a.stop();
  b.stop();
  const asking = client({ failoverWaitMs: 60_000 }).call('Stats', {}, { deadlineMs: 300 });
  await assert.rejects(asking, { name: 'CallFailed' });
});

test('a list is checked', () => {
  assert.throws(() => new Targets('a:1,'), /target '' of 'a:1,' is empty/);
  assert.throws(() => new Targets('a:1,b:2,a:1'), /'a:1' of .* listed twice/);
  assert.deepEqual(new Targets(' a:1, b:2').all, ['a:1', 'b:2']);
});

test('a leader that failed is not followed', () => {
  const targets = new Targets('a:1,b:2,c:3');
  targets.moveOn('a:1');
  targets.moveOn('b:2', 'a:1');
  assert.equal(targets.current, 'c:3');
});

test('a silent target is passed over while another answers', () => {
  const targets = new Targets('a:1,b:2');
  targets.moveOn('a:1', '', { nowMs: 1_000, silentMs: 1_500 });
  for (const nowMs of [1_100, 2_400]) {
    targets.moveOn('b:2', 'a:1', { nowMs });
    assert.equal(targets.current, 'b:2');
  }
  targets.moveOn('b:2', 'a:1', { nowMs: 2_500 });
  assert.equal(targets.current, 'a:1');
});

test('one target is obeyed without a term', () => {
  const fence = new Fence({ strict: false });
  assert.ok(fence.obeys({ term: '3', leader: 'a/1' }));
  assert.ok(fence.obeys(null));
  assert.ok(!fence.obeys({ term: '2', leader: 'a/1' }));
  assert.equal(fenceOf(['a', 'b']), fenceOf(['b', 'a']));
});
