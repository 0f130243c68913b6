// Load on a live scheduler: node load.mjs cancels TARGET SEED, or node load.mjs kill TARGETS

import { createInterface } from 'node:readline';
import { Scheduler } from 'schedsvc';
import { sleep } from './wire.mjs';

const [verb, target, seed] = process.argv.slice(2);
const request = { tenant: 'red', inputTokens: [100], maxOutputTokens: 20, reportsProgress: true };
const AT_ONCE = 32;
const CANCELLED = 1_000;

let state = Number(seed ?? 1);
/** The next of the seed's random numbers from 0 to 1: those of Park and Miller. */
function random() {
  state = (state * 48_271) % 2_147_483_647;
  return state / 2_147_483_647;
}

/** Ask `count` times, AT_ONCE at a time. */
async function loops(count, ask) {
  let left = count;
  const loop = async () => {
    while (left-- > 0) await ask();
  };
  await Promise.all(Array.from({ length: AT_ONCE }, loop));
}

/** Ask 1,000 times, and withdraw each request after a random time: it waits, starts or runs. */
async function cancels(scheduler) {
  const counts = { withdrawn: 0, ran: 0, failed: 0 };
  const work = (admission) => {
    admission.report({ inputTokens: 100, outputTokens: 5 });
    return sleep(10 * random());
  };
  // How long a request takes here, if it is not withdrawn.
  const beganMs = performance.now();
  await loops(4 * AT_ONCE, () => scheduler.withAdmission(request, work));
  const usualMs = (performance.now() - beganMs) / 4;
  await loops(CANCELLED, async () => {
    const controller = new AbortController();
    const { signal } = controller;
    setTimeout(() => controller.abort(new Error('the user left')), 2 * usualMs * random());
    const running = (admission) => {
      counts.ran += 1;
      return work(admission).then(() => signal.throwIfAborted());
    };
    try {
      await scheduler.withAdmission(request, running, { signal });
    } catch (error) {
      counts[error === signal.reason ? 'withdrawn' : 'failed'] += 1;
    }
  });
  await scheduler.close();
  return counts;
}

/** Ask without a pause until a line arrives or a request fails; say how many were served. */
async function kill(scheduler) {
  const counts = { served: 0, failed: [] };
  let goesOn = true;
  async function loop() {
    while (goesOn) {
      await scheduler.withAdmission(request, async ({ signal }) => {
        await sleep(20);
        signal.throwIfAborted();
      });
      counts.served += 1;
      if (counts.served % 100 === 0) console.log(counts.served);
    }
  }
  createInterface({ input: process.stdin }).once('line', () => (goesOn = false));
  try {
    await Promise.all(Array.from({ length: AT_ONCE }, loop));
    await scheduler.close();
  } catch (error) {
    counts.failed.push(String(error));
  }
  return counts;
}

const scheduler = new Scheduler(target, { token: process.env.SCHEDSVC_TOKEN });
console.log(JSON.stringify(await { cancels, kill }[verb](scheduler)));
process.exit(0);
