/**
 * What the fault tests share: a seed, a record of what was tried and lost, and looking at a machine
 * from outside: which processes are left, which locks are held, whether every state file is whole.
 *
 * Environment: AUTOMATON_FAULTS=full for the long run, AUTOMATON_FAULT_SEED to repeat one,
 * AUTOMATON_FAULT_RECORD names the file that the table is made from (`tests/run` sets it).
 */
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { parseLoopState, parseTaskState, type TaskState } from "../../scripts/status.ts";
import { git, poll, type Scratch } from "../helpers.ts";
import type { Loss, Row } from "./losses.ts";

/** True in the long run, `tests/run --faults`. */
export const IS_FULL = Deno.env.get("AUTOMATON_FAULTS") === "full";

/** What every choice of this run follows from. */
export const SEED = Number(
  Deno.env.get("AUTOMATON_FAULT_SEED") || crypto.getRandomValues(new Uint32Array(1))[0]!,
);

/** Choices that are the same for the same seed. */
export class Random {
  #state: number;

  /** @param stream Keeps the choices of one test apart from those of another. */
  constructor(stream: string, seed = SEED) {
    this.#state = Math.imul(seed, 0x9e3779b1);
    for (const char of stream) {
      this.#state = Math.imul(this.#state ^ char.charCodeAt(0), 0x01000193);
    }
  }

  /** A number from 0 up to but without 1 (mulberry32, a public-domain generator). */
  next(): number {
    this.#state = (this.#state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(this.#state ^ (this.#state >>> 15), 1 | this.#state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  }

  /** A whole number from 0 up to but without a bound. */
  below(bound: number): number {
    return Math.floor(this.next() * bound);
  }

  /** One of a list. */
  pick<T>(items: readonly T[]): T {
    return items[this.below(items.length)]!;
  }

  /** A list in another order. */
  shuffle<T>(items: readonly T[]): T[] {
    const left = [...items];
    return items.map(() => left.splice(this.below(left.length), 1)[0]!);
  }
}

/** All cases in the long run; in the short one a few of them, by the seed. */
export function chooseCases<T>(stream: string, cases: readonly T[], few: number): readonly T[] {
  return IS_FULL ? cases : new Random(stream).shuffle(cases).slice(0, few);
}

/** Counts what one kind of fault came to. */
export class Tally {
  tried = 0;
  readonly #losses: { loss: Loss; what: string }[] = [];

  constructor(readonly kind: string) {}

  /** Notes one thing that went wrong. */
  lose(loss: Loss, what: string): void {
    this.#losses.push({ loss, what });
  }

  /** Notes a loss unless a condition holds. */
  check(holds: boolean, loss: Loss, what: string | (() => string)): void {
    if (!holds) this.lose(loss, typeof what === "string" ? what : what());
  }

  /**
   * Writes the line of the table; throws with all that went wrong, and the seed to repeat it.
   *
   * @param record The file that gets the line; null for none.
   */
  close(record: string | null = Deno.env.get("AUTOMATON_FAULT_RECORD") || null): void {
    const losses: Partial<Record<Loss, number>> = {};
    for (const { loss } of this.#losses) losses[loss] = (losses[loss] ?? 0) + 1;
    const row: Row = { kind: this.kind, seed: SEED, tried: this.tried, losses };
    if (record !== null) {
      Deno.writeTextFileSync(record, `${JSON.stringify(row)}\n`, { append: true });
    }
    if (this.tried === 0) throw new Error(`${this.kind}: nothing was tried`);
    if (this.#losses.length === 0) return;
    const shown = this.#losses.slice(0, 60).map(({ loss, what }) => `- ${loss}: ${what}`);
    throw new Error(
      `${this.kind}: ${this.#losses.length} of ${this.tried} went wrong ` +
        `(AUTOMATON_FAULT_SEED=${SEED} repeats it)\n${shown.join("\n")}`,
    );
  }
}

/** A living process of a scratch folder. */
export interface Living {
  readonly pid: number;
  readonly command: string;
}

function readProc(pid: string, file: string): string {
  try {
    return Deno.readTextFileSync(`/proc/${pid}/${file}`);
  } catch {
    return ""; // It ended meanwhile, or belongs to the kernel.
  }
}

/** The processes that were started with a scratch folder's environment, whoever their parent is. */
export function listLiving(scratch: Scratch): Living[] {
  const found: Living[] = [];
  for (const { name } of Deno.readDirSync("/proc")) {
    if (!/^\d+$/.test(name) || !readProc(name, "environ").includes(`=${scratch.home}\0`)) continue;
    const command = readProc(name, "cmdline").replaceAll("\0", " ").trim();
    // What has ended and waits for its parent has no command line any more.
    if (command !== "") found.push({ pid: Number(name), command });
  }
  return found;
}

/** Kills a process at once; one that has ended meanwhile is as dead as was wanted. */
export function killNow(pid: number): void {
  try {
    Deno.kill(pid, "SIGKILL");
  } catch {
    // It has ended by itself.
  }
}

/** Waits until no process of a scratch folder lives; returns those that still do. */
export async function awaitNoneLiving(scratch: Scratch, timeoutMs = 5000): Promise<Living[]> {
  try {
    await poll("end of all processes", () => listLiving(scratch).length === 0, { timeoutMs });
    return [];
  } catch {
    return listLiving(scratch);
  }
}

/** The lock files below a folder that somebody holds although no process should be at work. */
export function listHeldLocks(scratch: Scratch): string[] {
  return listFiles(join(scratch.project, ".automaton"))
    .filter((path) => path.endsWith(".state.lock"))
    .filter((path) => !isFree(path));
}

function isFree(lockPath: string): boolean {
  const args = ["--nonblock", "--exclusive", lockPath, "true"];
  return new Deno.Command("flock", { args, stdin: "null" }).outputSync().success;
}

/** Every file below a folder; what vanishes meanwhile is passed over. */
export function listFiles(dir: string): string[] {
  const found: string[] = [];
  const visit = (folder: string): void => {
    let entries: Deno.DirEntry[] = [];
    try {
      entries = [...Deno.readDirSync(folder)];
    } catch {
      return; // Removed while it was looked at.
    }
    for (const { name, isDirectory } of entries) {
      if (name === "worktree" || name === ".git") continue;
      if (isDirectory) visit(join(folder, name));
      else found.push(join(folder, name));
    }
  };
  visit(dir);
  return found;
}

/** Everything that a project remembers. */
export interface Memory {
  readonly loops: ReadonlyMap<string, ReturnType<typeof parseLoopState>>;
  readonly tasks: ReadonlyMap<string, TaskState>;
  readonly problems: readonly string[];
}

/** Reads every state file of a project and its copy; those that are no whole states are problems. */
export function readMemory(scratch: Scratch): Memory {
  // A task's folder may move between the listing and the reading: then all is read again.
  for (let time = 0; time < 20; time++) {
    const memory = tryReadMemory(join(scratch.project, ".automaton"));
    if (memory !== null) return memory;
  }
  throw new Error("the project never stood still long enough to be read");
}

function tryReadMemory(automaton: string): Memory | null {
  const loops = new Map<string, ReturnType<typeof parseLoopState>>();
  const tasks = new Map<string, TaskState>();
  const problems: string[] = [];
  for (const path of listFiles(automaton)) {
    const name = path.split("/").at(-2)!;
    if (name.startsWith(".")) continue; // A folder in the making.
    try {
      if (/\/\.state\.loop(\.bak)?$/.test(path)) {
        const state = parseLoopState(Deno.readTextFileSync(path), path);
        if (path.endsWith(".loop")) loops.set(name, state);
      } else if (/\/tasks\/.*\/\.state(\.bak)?$/.test(path)) {
        const task = parseTaskState(Deno.readTextFileSync(path), path);
        if (path.endsWith(".state")) tasks.set(name, task);
      } else if (/\/\.state\.log(\.\d)?$/.test(path)) {
        for (const line of Deno.readTextFileSync(path).split("\n")) {
          if (line !== "") JSON.parse(line);
        }
      }
    } catch (error) {
      if (error instanceof Deno.errors.NotFound) return null;
      problems.push(`${path}: ${(error as Error).message}`);
    }
  }
  return { loops, tasks, problems };
}

/** What has gone back between two looks at a project: counters, approvals, histories, whole states. */
export function listSetBacks(before: Memory, after: Memory): string[] {
  const lost = [...after.problems];
  for (const [name, old] of before.loops) {
    const now = after.loops.get(name);
    if (now === undefined) {
      lost.push(`loop ${name} has lost its state`);
      continue;
    }
    for (const counter of ["iteration_count", "resumed_count"] as const) {
      if (now[counter] >= old[counter]) continue;
      lost.push(`loop ${name}: ${counter} went from ${old[counter]} to ${now[counter]}`);
    }
    if ((now.iteration_base ?? 0) < (old.iteration_base ?? 0)) {
      lost.push(`loop ${name}: iteration_base went back`);
    }
  }
  for (const [name, old] of before.tasks) {
    const now = after.tasks.get(name);
    if (now === undefined) {
      lost.push(`task ${name} has lost its state`);
      continue;
    }
    const kept = now.history.slice(0, old.history.length);
    if (JSON.stringify(kept) !== JSON.stringify(old.history)) {
      lost.push(`task ${name} has another history than before`);
    }
    if (
      old.approved_at !== null && now.approved_at === null && kept.length === now.history.length
    ) {
      lost.push(`task ${name} has lost its approval`);
    }
    if (now.history.at(-1)?.to !== now.phase) {
      lost.push(`task ${name} is in ${now.phase}, its history in ${now.history.at(-1)?.to}`);
    }
  }
  return lost;
}

/** What a crash may leave behind and the next tick has to clear away. */
export function listTemporaries(scratch: Scratch, loop: string): string[] {
  const dir = join(scratch.project, ".automaton", "loops", loop);
  return [...Deno.readDirSync(dir)].map(({ name }) => name)
    .filter((name) => name.startsWith(".snapshot-") || HALF_WRITTEN.test(name));
}

/** The names of files that a save was cut off in. */
export const HALF_WRITTEN = /^\..+\.tmp-\d+$/;

/** A person's checkout in words to compare: commit, branch, every file, the stash and the settings. */
export function describeCheckout(scratch: Scratch): string {
  const { project } = scratch;
  if (!existsSync(join(project, ".git"))) return "";
  const ask = (...args: string[]) => git(scratch, project, "--no-optional-locks", ...args);
  const isBare = ask("rev-parse", "--is-bare-repository") === "true";
  const outside = ["--", ".", ":(exclude).automaton"];
  const files = [...Deno.readDirSync(project)]
    .filter(({ name, isFile }) => isFile && name !== ".git")
    .map(({ name }) => `${name}: ${Deno.readTextFileSync(join(project, name))}`)
    .sort();
  return [
    isBare ? "bare" : ask("status", "--porcelain=v2", "--branch", ...outside),
    ask("for-each-ref", "refs/stash"),
    ask("config", "--local", "--list"),
    ...files,
  ].join("\n");
}

/** Runs jobs with a bound on how many are at work at a time. */
export async function runAll(
  jobs: readonly (() => Promise<void>)[],
  width: number,
): Promise<void> {
  const left = [...jobs];
  const work = async (): Promise<void> => {
    for (let job = left.shift(); job !== undefined; job = left.shift()) await job();
  };
  await Promise.all(Array.from({ length: width }, work));
}
