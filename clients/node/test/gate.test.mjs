// Tests of the middlewares in real servers, with a fake scheduler: node --test gate.test.mjs

import assert from 'node:assert/strict';
import { once } from 'node:events';
import { readFile } from 'node:fs/promises';
import { createServer } from 'node:http';
import { after, afterEach, beforeEach, describe, test } from 'node:test';
import express from 'express';
import fastify from 'fastify';
import { Scheduler } from 'schedsvc';
import { expressGate, fastifyGate, turnOf } from 'schedsvc/gate';
import { delayed, failure, FakeScheduler, grant, refusal, status } from 'schedsvc/testing';

const url = new URL('../../conformance/gates/refusals.json', import.meta.url);
const table = JSON.parse(await readFile(url, 'utf8'));
const camel = ({ kind, limit, reset_ms: resetMs }) => ({ kind, limit, remaining: 1, resetMs });

/** The headers of the gate. */
function told(headers) {
  const isOfGate = ([name]) => /^(retry-after|x-should-retry|x-ratelimit|x-schedsvc)/.test(name);
  return Object.fromEntries([...headers].filter(isOfGate));
}

/** The headers with these limits. */
function limitHeaders(limits) {
  const named = limits.filter(({ name }) => name);
  return Object.fromEntries(named.flatMap(({ name, limit, reset }) => [
    [`x-ratelimit-limit-${name}`, `${limit}`],
    [`x-ratelimit-remaining-${name}`, '1'],
    [`x-ratelimit-reset-${name}`, reset],
  ]));
}

let fake;
let scheduler;
let handle; // (turn, response) => text or nothing, if it writes the response itself

const sizeOf = ({ headers, body }) => {
  if (headers['x-tenant'] === 'free') return undefined;
  if (headers['x-tenant'] === 'wrong') return 100;
  const { length } = body.text;
  return { tenant: headers['x-tenant'], inputTokens: [length], maxOutputTokens: body.most };
};
const turnOrNone = (request) =>
  request.headers['x-tenant'] === 'free' ? undefined : turnOf(request);

const servers = {
  async express() {
    const app = express();
    const gate = expressGate({ admit: (...given) => scheduler.admit(...given) }, sizeOf);
    app.post('/sum', express.json(), gate, async (request, response) => {
      const text = await handle(turnOrNone(request), response);
      if (text !== undefined) response.send(text);
    });
    app.use((error, request, response, next) => response.status(500).send(error.message));
    const server = createServer(app).listen(0, '127.0.0.1');
    await once(server, 'listening');
    return { url: `http://127.0.0.1:${server.address().port}/sum`, close: () => server.close() };
  },
  async fastify() {
    const app = fastify();
    const gate = fastifyGate({ admit: (...given) => scheduler.admit(...given) }, sizeOf);
    app.post('/sum', { preHandler: gate }, async (request, reply) => {
      const text = await handle(turnOrNone(request), reply.raw);
      if (text === undefined) reply.hijack();
      return text;
    });
    const url = `${await app.listen({ port: 0, host: '127.0.0.1' })}/sum`;
    return { url, close: () => app.close() };
  },
};

for (const [name, start] of Object.entries(servers)) {
  describe(name, async () => {
    const server = await start();
    after(() => server.close());

    beforeEach(async () => {
      fake = new FakeScheduler();
      await fake.start();
      scheduler = new Scheduler(fake.target);
      handle = () => 'done';
    });

    afterEach(async () => {
      await scheduler.close();
      fake.stop();
    });

    const ask = ({ tenant = 'red', most = 20, signal } = {}) =>
      fetch(server.url, {
        method: 'POST',
        signal,
        body: JSON.stringify({ text: 'four', most }),
        headers: { 'content-type': 'application/json', 'x-tenant': tenant },
      });
    const left = (asking) => assert.rejects(asking, { name: 'AbortError' });
    const ended = async () => {
      while (!fake.leases.size || fake.live.length) await new Promise(setImmediate);
      return [...fake.leases.values()].at(-1).ends[0];
    };

    test('an answer ends the lease with what was reported', async () => {
      handle = ({ admission }) => {
        admission.report({ inputTokens: 4, outputTokens: 7 });
        return 'done';
      };
      const response = await ask();
      assert.deepEqual([response.status, await response.text()], [200, 'done']);
      assert.ok(Number(response.headers.get('x-schedsvc-queue-duration-ms')) >= 0);
      const [{ tenant, inputTokens, maxOutputTokens }] = fake.requests;
      assert.deepEqual([tenant, inputTokens, maxOutputTokens], ['red', ['4'], '20']);
      const { outcome, outputTokens } = await ended();
      assert.deepEqual([outcome, outputTokens], ['OUTCOME_COMPLETED', '7']);
    });

    test('each refusal is answered by the table of all gates', async () => {
      handle = () => assert.fail('it ran');
      const quota = { limits: table.limits.map(camel) };
      for (const { outcome, status, type, code, reason } of table.outcomes) {
        for (const { retry_after_ms: retryAfterMs, headers } of table.retries) {
          const tenants = [['red', table.limits], ['', []]];
          for (const [tenant, limits] of tenants) {
            fake.script(refusal(outcome, { message: 'not now', retryAfterMs, quota }));
            const response = await ask({ tenant });
            const { error } = await response.json();
            assert.deepEqual(error, { message: 'not now', type, code, param: null });
            assert.equal(response.status, status);
            const { requestId } = fake.requests.at(-1);
            assert.deepEqual(told(response.headers), {
              ...headers,
              ...limitHeaders(limits),
              'x-schedsvc-dropped-reason': reason,
              'x-schedsvc-queue-duration-ms': '0.000',
              'x-schedsvc-request-id': requestId,
            });
          }
        }
      }
    });

    test('an answer tells the request and the quotas of its tenant', async () => {
      for (const [tenant, limits] of [['red', table.limits], ['', []]]) {
        fake.script(grant({ quota: { limits: table.limits.map(camel) } }));
        assert.deepEqual(told((await ask({ tenant })).headers), {
          ...limitHeaders(limits),
          'x-schedsvc-queue-duration-ms': '0.000',
          'x-schedsvc-request-id': fake.requests.at(-1).requestId,
        });
      }
    });

    test('a scheduler that is away is a 503 with Retry-After', async () => {
      fake.script(failure(status.UNAVAILABLE));
      const response = await ask();
      assert.equal(response.status, 503);
      assert.deepEqual(told(response.headers), {
        'retry-after': '1',
        'retry-after-ms': '1000',
        'x-schedsvc-dropped-reason': 'scheduler_unreachable',
      });
    });

    test('a size that the scheduler refuses is a 400', async () => {
      fake.script(failure(status.INVALID_ARGUMENT, 'max_output_tokens: at least 1'));
      const response = await ask({ most: 0 });
      assert.equal(response.status, 400);
      assert.match((await response.json()).error.message, /max_output_tokens: at least 1/);
    });

    test('a mistake of the server is not its client’s', async () => {
      fake.script(failure(status.UNAUTHENTICATED));
      assert.equal((await ask()).status, 500);
    });

    test('a wrong size is not its client’s mistake', async () => {
      handle = () => assert.fail('it ran');
      const response = await ask({ tenant: 'wrong' });
      assert.equal(response.status, 500);
      assert.match(await response.text(), /AdmitRequest is 100; it has to be an object/);
    });

    test('a request without a size passes', async () => {
      assert.equal((await ask({ tenant: 'free' })).status, 200);
      assert.equal(fake.requests.length, 0);
    });

    test('a client that leaves while it waits is withdrawn', async () => {
      handle = () => assert.fail('it ran');
      fake.script(delayed(Infinity));
      const controller = new AbortController();
      const asking = ask({ signal: controller.signal });
      while (!fake.requests.length) await new Promise(setImmediate);
      controller.abort();
      await left(asking);
      while (!fake.withdrawn.length) await new Promise(setImmediate);
    });

    test('a client that leaves while it is served cancels its lease', async () => {
      const controller = new AbortController();
      let aborted = false;
      handle = async ({ signal }, response) => {
        response.write('some');
        await once(signal, 'abort');
        aborted = true;
      };
      const response = await ask({ signal: controller.signal });
      controller.abort();
      await left(response.text());
      assert.equal((await ended()).outcome, 'OUTCOME_CANCELLED');
      while (!aborted) await new Promise(setImmediate);
    });

    test('a handler that fails cancels its lease', async () => {
      handle = () => {
        throw new Error('the engine failed');
      };
      const response = await ask();
      assert.equal(response.status, 500);
      assert.match(await response.text(), /the engine failed/);
      assert.equal((await ended()).outcome, 'OUTCOME_CANCELLED');
    });

    test('a lost lease aborts the signal', async () => {
      fake.ttlMs = 30;
      handle = async ({ admission, signal }) => {
        fake.leases.get(admission.leaseId).state = 'LEASE_STATE_VOID';
        await once(signal, 'abort');
        return 'stopped';
      };
      assert.equal(await (await ask()).text(), 'stopped');
    });
  });
}

test('a request that was not gated has no turn', () => {
  assert.throws(() => turnOf({}), /was not gated/);
  assert.throws(() => turnOf(), /^TypeError: request is undefined; it has to be an object$/);
});

test('a gate without a scheduler or a size is not made', () => {
  for (const gate of [expressGate, fastifyGate]) {
    assert.throws(() => gate(sizeOf, scheduler), /^TypeError: scheduler is .* a Scheduler$/s);
    assert.throws(() => gate({ admit() {} }), /^TypeError: sizeOf is undefined; .* a function$/);
  }
});
