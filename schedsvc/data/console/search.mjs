// The search for a request: what is known of it, in sentences and tables.

import { count, duration } from './figures.mjs';
import { plainTable } from './table.mjs';

/** Answer the form with what `why.json` says. */
export function listen(form, answer) {
  form.addEventListener('submit', async (event) => {
    event.preventDefault();
    const id = form.querySelector('#why-id').value.trim();
    const tenant = form.querySelector('#why-tenant').value.trim();
    if (!id) return;
    try {
      const asked = new URLSearchParams({ id, tenant });
      const response = await fetch(`why.json?${asked}`, { cache: 'no-store' });
      answer.replaceChildren(...parts(id, await response.json()));
    } catch (error) {
      answer.replaceChildren(article([`The scheduler did not answer: ${error.message}.`]));
    }
  });
}

function parts(id, { problem, requests, left_out }) {
  if (problem) return [article([problem])];
  if (!requests.length) {
    return [article([`Nothing is known of request ${id}: no client has asked for it, or it has been
      forgotten, or its tenant is not in the configuration (name the tenant).`])];
  }
  const found = requests.map(story);
  if (left_out) found.push(article([`${count(left_out)} more tenants used this id: name one.`]));
  return found;
}

function story(request) {
  const input = `${count(request.prompt_tokens)} tokens of input`;
  const each = request.sequences > 1 ? ` for each of ${request.sequences}` : '';
  const output = `at most ${count(request.max_output_tokens)} of output${each}`;
  const made = article([
    `${request.state}: ${request.message}`,
    `Tenant ${request.tenant}, class ${request.request_class}, ${input}, ${output}.`,
    firstToken(request),
  ]);
  if (request.waited.length) {
    const whole = Math.max(1, request.queue_us);
    made.append(plainTable(['waited for', 'time', 'part'], request.waited.map((row) => [
      row.reason, duration(row.time_us / 1_000), `${Math.round(100 * row.time_us / whole)} %`,
    ])));
  }
  if (request.pools.length) {
    const heads = ['pool', 'next', 'waits for', 'needs, tokens', 'load with it', 'allowed'];
    made.append(plainTable(heads, request.pools.map((row) => [
      row.attached ? row.pool : `${row.pool} (detached)`, row.next, row.reason,
      count(row.need_tokens), count(row.load_tokens), count(row.load_max_tokens),
    ])));
  }
  return made;
}

function firstToken(request) {
  if (request.ttft_ms > 0) return `First token after ${duration(request.ttft_ms)}.`;
  if (request.ttft_expected_ms < 0) return '';
  return `First token expected ${duration(request.ttft_expected_ms)} after its arrival.`;
}

function article(paragraphs) {
  const made = document.createElement('article');
  for (const text of paragraphs) {
    if (!text) continue;
    const paragraph = document.createElement('p');
    paragraph.textContent = text;
    made.append(paragraph);
  }
  // A wide table scrolls by itself.
  made.className = 'scroll';
  made.tabIndex = 0;
  return made;
}
