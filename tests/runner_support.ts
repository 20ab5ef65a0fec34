/** What the tests of loop-runner share: a loop with a scripted agent, and ticks of it. */
import { join } from "@std/path";
import {
  finish,
  lastJson,
  loopDir,
  makeRepository,
  makeScratch,
  readJson,
  type Result,
  ROOT,
  type RunOptions,
  type Scratch,
  startProgram,
  writeLoop,
  writeTask,
} from "./helpers.ts";

/** The loop and the task of most tests. */
export const LOOP = "night";
/** The task that the loop works on. */
export const TASK = "fix-it";

/** How the loop of a test differs from one that works on TASK with an honest agent. */
export interface LoopPlan {
  /** sh scripts of the roles, run by tests/fixtures/harness.sh. */
  readonly implement?: string;
  readonly verify?: string;
  readonly orchestrate?: string;
  /** The task's phase; null for no task. */
  readonly phase?: string | null;
  /** Merged over loop.json, one level deep. */
  readonly config?: Readonly<Record<string, unknown>>;
  /** Written over the state. */
  readonly state?: Readonly<Record<string, unknown>>;
  /** False for a project that git does not know. */
  readonly isRepository?: boolean;
}

/** Merges objects one level deep. */
function mergeFields(
  base: Readonly<Record<string, unknown>>,
  over: Readonly<Record<string, unknown>>,
): Record<string, unknown> {
  const merged: Record<string, unknown> = { ...base };
  for (const [key, value] of Object.entries(over)) {
    const known = merged[key];
    const isMergeable = (v: unknown) => typeof v === "object" && v !== null && !Array.isArray(v);
    merged[key] = isMergeable(known) && isMergeable(value)
      ? { ...known as object, ...value as object }
      : value;
  }
  return merged;
}

/** The argv of the scripted agent. */
export const HARNESS = ["sh", join(ROOT, "tests/fixtures/harness.sh"), "{role}", "{prompt}"];

/** Makes the project a repository with a task and a loop that works on it; returns the loop's folder. */
export function makeLoop(scratch: Scratch, plan: LoopPlan = {}): string {
  if (plan.isRepository !== false) {
    makeRepository(scratch, scratch.project, {
      "README.md": "a project\n",
      ".gitignore": ".automaton/\n",
    });
  }
  const phase = plan.phase === undefined ? "implement" : plan.phase;
  if (phase !== null) writeTask(scratch, TASK, phase, { loop: LOOP });
  const env: Record<string, string> = { AGENT_JOURNAL: join(scratch.dir, "journal") };
  for (const role of ["implement", "verify", "orchestrate"] as const) {
    const script = plan[role];
    if (script !== undefined) env[`AGENT_${role.toUpperCase()}`] = script;
  }
  const config = mergeFields({
    work_source: { kind: "single" },
    roles: plan.orchestrate === undefined ? {} : { orchestrate: {} },
    harness: { command: HARNESS, env, timeout_seconds: 60 },
  }, plan.config ?? {});
  return writeLoop(scratch, LOOP, config, {
    current_task: phase === null ? null : TASK,
    ...plan.state,
  });
}

/** A scratch folder with such a loop in it. */
export function makeLoopScratch(plan: LoopPlan = {}, projectName = "project"): Scratch {
  const scratch = makeScratch(projectName);
  makeLoop(scratch, plan);
  return scratch;
}

/** A window that is large enough, so that no GPU is looked for. */
const WINDOW = { AUTOMATON_CONTEXT_TOKENS: "131072" };

/** Starts a tick. */
export function startTick(
  scratch: Scratch,
  args: readonly string[] = [],
  options: RunOptions = {},
): Deno.ChildProcess {
  return startProgram(scratch, "loop-runner", ["--mode", "tick", "--loop", LOOP, ...args], {
    ...options,
    env: { ...WINDOW, ...options.env },
  });
}

/** What a tick's `--json` says, with what its process left. */
export interface TickResult extends Result {
  readonly json: Summary;
}

/** The fields of a summary that tests look at. */
export interface Summary {
  readonly loop: string;
  readonly tick: number | null;
  readonly ok: boolean;
  readonly skipped: boolean;
  readonly reason: string | null;
  readonly message: string | null;
  readonly task: string | null;
  readonly phase: string | null;
  readonly next_phase: string | null;
  readonly verdict: {
    readonly pass: boolean;
    readonly score: number;
    readonly reasons: readonly string[];
    readonly next_hint?: string;
  } | null;
  readonly checks: readonly {
    readonly result: string;
    readonly exit_code: number | null;
    readonly output: string;
  }[];
  readonly cost_usd: number | null;
  readonly iteration_count: number | null;
  readonly status: string | null;
  readonly halt_reason: string | null;
  readonly artifacts: Readonly<Record<string, string>>;
  readonly durations_ms: Readonly<Record<string, number>>;
  readonly warnings: readonly string[];
}

/** Runs a tick to its end. */
export async function tick(
  scratch: Scratch,
  args: readonly string[] = [],
  options: RunOptions = {},
): Promise<TickResult> {
  const result = await finish(startTick(scratch, [...args, "--json"], options), options.timeoutMs);
  return { ...result, json: lastJson(result) as unknown as Summary };
}

/** The loop's state as it is on disk. */
export function readState(scratch: Scratch): Record<string, unknown> {
  return readJson(join(loopDir(scratch, LOOP), ".state.loop"));
}

/** The text of the loop's state, to compare byte for byte. */
export function readStateText(scratch: Scratch): string {
  return Deno.readTextFileSync(join(loopDir(scratch, LOOP), ".state.loop"));
}

/** The phase of a task, wherever its folder lies. */
export function readPhase(scratch: Scratch, task = TASK): string {
  const tasks = join(scratch.project, ".automaton/tasks");
  for (const parent of [tasks, join(tasks, "complete")]) {
    try {
      return `${readJson(join(parent, task, ".state")).phase}`;
    } catch (error) {
      if (!(error instanceof Deno.errors.NotFound)) throw error;
    }
  }
  throw new Error(`no task ${task}`);
}

/** Which roles have run, in order: "implement research" and so on. */
export function readJournal(scratch: Scratch): string[] {
  try {
    return Deno.readTextFileSync(join(scratch.dir, "journal")).trimEnd().split("\n");
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return [];
    throw error;
  }
}

/** The path of one of a tick's outputs. */
export function outputOf(scratch: Scratch, name: string): string {
  return join(loopDir(scratch, LOOP), "outputs", name);
}

/** The loop's worktree. */
export function worktreeOf(scratch: Scratch): string {
  return join(loopDir(scratch, LOOP), "worktree");
}
