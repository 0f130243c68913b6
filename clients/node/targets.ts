// Target lists and fencing: which of several schedulers a client asks, and whose answers it obeys.

import type { Leadership__Output } from './build/schedsvc/v1/Leadership';

const TARGETS_MAX = 16;
const FENCES_MAX = 1_024;
/** The longest pause before the next attempt; and for NAMED_MS after the leader was named. */
export const JITTER_MS = 200;
export const NAMED_JITTER_MS = 20;
const NAMED_MS = 500;
/** The same name shortens the pauses again after this time, as a dead leader may be named. */
const NAMED_AGAIN_MS = 2_000;

/** The targets of one client, separated by commas. Throws if one is empty or listed twice. */
export class Targets {
  readonly all: string[];
  current: string;
  #failed = new Set<string>();
  #silentUntilMs = new Map<string, number>();
  #named = { leader: '', sinceMs: 0, quickUntilMs: 0 };

  constructor(text: string) {
    this.all = text.split(',').map((part) => part.trim());
    const wrong = this.all.find((target, index) => !target || this.all.indexOf(target) < index);
    if (wrong !== undefined) {
      throw new Error(`target '${wrong}' of '${text}' is empty or listed twice`);
    }
    if (this.all.length > TARGETS_MAX) {
      throw new Error(`${this.all.length} targets are listed; list at most ${TARGETS_MAX}`);
    }
    this.current = this.all[0]!;
  }

  get several(): boolean {
    return this.all.length > 1;
  }

  /** Take note that the current target serves this client. */
  answered(): void {
    this.#failed.clear();
    this.#silentUntilMs.clear();
  }

  /**
   * Move on from a target that failed: to the leader that it named, if that one is in the list and
   * has not failed itself; else to the next. `silentMs`: it gave no answer, and is passed over for
   * that time while others answer. No effect if another call has moved on already.
   */
  moveOn(failed: string, leader?: string, { nowMs = 0, silentMs = 0 } = {}): void {
    if (failed !== this.current || !this.several) return;
    this.#failed.add(failed);
    if (silentMs) this.#silentUntilMs.set(failed, nowMs + silentMs);
    const at = this.all.indexOf(failed) + 1;
    const ring = [...this.all.slice(at), ...this.all.slice(0, at)];
    const heard = ring.filter((target) => (this.#silentUntilMs.get(target) ?? 0) <= nowMs);
    if (leader !== undefined && heard.includes(leader) && !this.#failed.has(leader)) {
      this.current = leader;
      if (leader !== this.#named.leader || nowMs >= this.#named.sinceMs + NAMED_AGAIN_MS) {
        this.#named = { leader, sinceMs: nowMs, quickUntilMs: nowMs + NAMED_MS };
      }
    } else this.current = heard[0] ?? ring[0]!;
    if (this.#failed.size === this.all.length) this.#failed.clear();
  }

  /** The longest pause before the next attempt: short after a target has named the leader. */
  pauseMsMax(nowMs: number): number {
    return nowMs < this.#named.quickUntilMs ? NAMED_JITTER_MS : JITTER_MS;
  }
}

/**
 * The highest leadership that this process has seen. The term is compared first; an equal term of
 * another leader, and a lower term, are not obeyed. With several targets (`strict`) an answer
 * without a leadership counts as term 0.
 */
export class Fence {
  #strict: boolean;
  #leader = '';
  term = 0n;

  constructor({ strict = true } = {}) {
    this.#strict = strict;
  }

  /** Whether an answer under this leadership takes effect; a higher one is noted. */
  obeys(leadership?: Leadership__Output | null): boolean {
    const term = BigInt(leadership?.term ?? 0);
    const leader = term ? leadership!.leader : '';
    if (term > this.term) {
      this.term = term;
      this.#leader = leader;
    }
    return (term === this.term && leader === this.#leader) || (!term && !this.#strict);
  }
}

const fences = new Map<string, Fence>();

/** This process's fence for the schedulers of a target list, in whatever order. */
export function fenceOf(targets: readonly string[]): Fence {
  const key = [...targets].sort().join(',');
  const fence = fences.get(key) ?? new Fence({ strict: targets.length > 1 });
  fences.delete(key);
  fences.set(key, fence);
  if (fences.size > FENCES_MAX) fences.delete(fences.keys().next().value!);
  return fence;
}

/** Whether a target is on this host by its name: a Unix socket, or a loopback address. */
export function isLocal(target: string): boolean {
  if (target.startsWith('unix:')) return true;
  const address = target.replace(/^(dns|ipv4|ipv6):(.*\/)?/, '');
  const host = address.replace(/:\d+$/, '').replace(/^\[|\]$|\.$/g, '').toLowerCase();
  return (
    host === 'localhost' ||
    host.endsWith('.localhost') ||
    ['0.0.0.0', '::', '::1'].includes(host) ||
    /^(::ffff:)?127(\.\d{1,3}){3}$/.test(host)
  );
}
