#!/usr/bin/env -S deno run -q --no-prompt -P=loop-runner
/**
 * Runs one tick of a loop, or one after the other: gate, work, worktree, Implement, Verify,
 * Orchestrate, one save. An agent does the work and another judges it; this program starts them, ends
 * them, believes nothing but a verdict, and leaves a loop's state whole at any crash.
 *
 * Reads `<project>/.automaton/loops/<name>/loop.json` and the prompts of the loop and the framework.
 * Writes the loop's `.state.loop` with its `.bak`, `.state.log`, `.state.lock`, `cost.json`, `outputs/` and
 * `worktree/`, the branch `loop/<name>`, a line in the repository's `info/exclude`, and a missing phase
 * document of the task. Rules of the pipeline are `status`'s, which is asked each time.
 *
 * Environment: AUTOMATON_HOME (framework), AUTOMATON_PROJECT (project), AUTOMATON_DUE_INTERVAL_S and
 * AUTOMATON_DUE_PERIOD_S (set by a schedule that wakes the loop more often than it ticks), HOME, USERPROFILE,
 * XDG_CONFIG_HOME and PATH. A harness
 * gets AUTOMATON_HOME, AUTOMATON_PROJECT, AUTOMATON_LOOP, AUTOMATON_ROLE, AUTOMATON_TASK,
 * AUTOMATON_OP_FILE, AUTOMATON_RUN_ID and PWD.
 *
 * Permissions: read, write and run (a loop may name any project and any agent), env (an agent gets the
 * person's environment, less what loop.json takes away), sys (the host's name). No network.
 *
 * Exit codes: 0 a tick that ran or was skipped, a daemon that was ended; 1 no such project; 2 usage;
 * 129, 130 and 143 a tick that was ended by HUP, INT or TERM, once its harness is gone.
 *
 * @module
 */

import { parseArgs } from "@std/cli";
import { ensureDirSync, existsSync } from "@std/fs";
import { parse as parseJsonc } from "@std/jsonc";
import { basename, dirname, fromFileUrl, join, resolve } from "@std/path";

// --- Constants ---

/** Why a tick did nothing; the strings are stable. */
export const SKIP_REASONS = [
  "untracked",
  "gate_failed",
  "halted",
  "paused",
  "complete",
  "backoff",
  "no_current_task",
  "no_work",
  "task_claimed_by_other_loop",
  "tick_in_progress",
  "worktree_failed",
  "harness_failed",
  "harness_timeout",
  "context_floor",
  "not_due",
] as const;

/** Those of SKIP_REASONS that nobody wanted. */
// deno-fmt-ignore -- one row.
const FAILURES: readonly SkipReason[] = ["gate_failed", "worktree_failed", "harness_failed", "harness_timeout", "context_floor"];

/** The steps of a tick whose time is taken. */
// deno-fmt-ignore -- one row.
export const STEPS = ["gate", "work", "context", "implement", "checks", "verify", "orchestrate", "total"] as const;

/** The signals that end a tick, and what it exits with. */
export const EXIT_CODES = { SIGHUP: 129, SIGINT: 130, SIGTERM: 143 } as const;

/** Characters that count as one token when a prompt is fitted: an estimate, since models differ. */
const CHARS_PER_TOKEN = 4;
const DEFAULT_TIER_TOKENS = 16_000;
const BRIEF_TOKENS = 4000;
const CRITERIA_TOKENS = 2000;
const HINT_TOKENS = 1000;
const TRUNCATION_MARK = " …[truncated]";

/**
 * The harness of a loop that names none. opencode mangles a prompt given as an argument, so it gets it on
 * stdin (checked with 1.18.34).
 */
export const DEFAULT_HARNESS = {
  command: ["opencode", "run", "--dir", "{cwd}"],
  model_args: ["-m", "{model}"],
  stdin: "prompt",
  env: {
    // Without a rule it asks before it looks outside its folder, and with nobody there that ends the session.
    OPENCODE_PERMISSION: '{"external_directory":{"*":"deny","{task_dir}/*":"allow"}}',
  },
} as const;
const DEFAULT_TIMEOUT_S = 3600;
const DEFAULT_RETENTION = 20;
const MAX_STREAM_BYTES = 64 * 1024 * 1024;
const TAIL_BYTES = 1024 * 1024;
const READ_BYTES = 64 * 1024;
const MAX_ARTIFACT_BYTES = 1024 * 1024;
const LOG_TAIL_BYTES = 16 * 1024;
const MAX_DIFF_BYTES = 4 * 1024 * 1024;
/** How long things may take that end a harness; together they stay below 10 s. */
const WATCH_MS = 200;
const TERM_GRACE_MS = 5000;
const KILL_GRACE_MS = 2000;
const DRAIN_MS = 1000;
/** Timers hold 31 bits. */
const MAX_TIMER_MS = 2 ** 31 - 1;
/** Characters of the note in a lock file, but for its newline. */
const NOTE_LENGTH = 1023;
/** Where the tools stand that list processes, whatever PATH a loop was started with. */
const TOOLS_PATH = "/usr/bin:/bin";
/** Younger temporary files may belong to a command that is writing one right now. */
const SCRATCH_AGE_MS = 3_600_000;
/** Younger locks of git may be those of a person who looks at the worktree. */
const STALE_LOCK_MS = 600_000;
const GIT_CHECKOUT_TIMEOUT_MS = 300_000;
const COMMIT_TIMEOUT_MS = 300_000;
const HOOK_TIMEOUT_MS = 60_000;
const CHECK_OUTPUT_CHARS = 4000;
/** What a hint shows of a check's output: its end is to survive the cut at HINT_TOKENS. */
const HINT_CHECK_CHARS = 1500;
/**
 * This program, or the Deno that runs it. Read at start: once an update has put another file in its
 * place, Linux names the running one "<path> (deleted)", and a tick would no longer find `status`.
 */
const EXECUTABLE = Deno.realPathSync(Deno.execPath());
/** Rate limits are told in the last lines; the same words further up may be code or logs. */
const BACKOFF_LINES = 20;
/** Deeper nesting than any verdict has; keeps the reader's recursion bounded. */
const MAX_DEPTH = 100;
const MAX_REASONS = 50;
const MAX_REASON_CHARS = 2000;
const MAX_HINT_CHARS = 16_000;

const ROLES: readonly RoleName[] = ["implement", "verify", "orchestrate"];

/** The prompt of a role that names none. */
const DEFAULT_PROMPTS: Readonly<Record<RoleName, string>> = {
  implement: "loop-implement.md",
  verify: "loop-verifier.md",
  orchestrate: "loop-orchestrate.md",
};

// --- Types ---

/** A schedule's wakes come every period, its ticks after each interval. */
export interface DueCheck {
  readonly intervalMs: number;
  /** Divides an hour. */
  readonly periodMs: number;
}

/** One of SKIP_REASONS. */
export type SkipReason = typeof SKIP_REASONS[number];

/** What a tick did; printed by `--json`. */
export interface Summary {
  readonly loop: string;
  readonly project: string;
  tick: number | null;
  ok: boolean;
  skipped: boolean;
  reason: SkipReason | null;
  /** The reason in words. */
  message: string | null;
  task: string | null;
  phase: string | null;
  next_phase: string | null;
  verdict: Verdict | null;
  readonly checks: CheckResult[];
  /** Dollars that this tick's harnesses reported; null when none did. */
  cost_usd: number | null;
  iteration_count: number | null;
  status: string | null;
  halt_reason: string | null;
  readonly artifacts: Record<string, string>;
  readonly durations_ms: Record<StepName, number>;
  readonly warnings: string[];
}

/** The steps of a tick whose time is taken. */
export type StepName = typeof STEPS[number];

/** What a run of a harness came to. */
export type HarnessResult =
  | "ok"
  | "exit_nonzero"
  | "reported_error"
  | "killed"
  | "timeout"
  | "idle_timeout"
  | "stopped"
  | "not_found"
  | "not_executable"
  | "argument_list_too_long"
  | "cannot_start";

interface HarnessOutcome {
  readonly result: HarnessResult;
  /** One line in words. */
  readonly message: string;
  /** Null when it did not end by itself or did not start. */
  readonly exitCode: number | null;
  /** The end of stdout, at most TAIL_BYTES. */
  readonly stdoutTail: string;
  readonly stderrTail: string;
  /** What the harness reported of its cost, where loop.json says how to read it. */
  readonly usage: UsageReport | null;
  readonly leftOver: number;
}

/** What one run of a harness cost, as far as it said so. */
export interface UsageReport {
  costUsd: number | null;
  inputTokens: number | null;
  outputTokens: number | null;
  /**
   * The answer's text, empty where JSON came without one: what an agent read or ran must not be taken for
   * its answer. Null where it is not to be taken from JSON, or where no line was of the kind described.
   */
  text: string | null;
  /** What the last record calls an error; null when it calls nothing one. */
  error: string | null;
}

/** How one of loop.json's checks went. */
export interface CheckResult {
  readonly command: readonly string[];
  readonly ok: boolean;
  readonly result: HarnessResult;
  readonly exit_code: number | null;
  readonly duration_ms: number;
  /** The end of what it printed. */
  readonly output: string;
}

/** A task as `status --task --json` shows it. */
interface TaskView {
  readonly name: string;
  readonly title: string;
  readonly phase: string;
  readonly dir: string;
  readonly document: string | null;
  readonly has_document: boolean;
  readonly next_phase: string | null;
  readonly needs_approval: boolean;
  readonly history: readonly { readonly to: string; readonly by: string }[];
}

/** One line of the process table. */
export interface ProcessEntry {
  readonly pid: number;
  readonly parent: number;
  readonly group: number;
  readonly isZombie: boolean;
  /** When it started, in the platform's own words: tells a recycled id from the same process. */
  readonly started: string;
}

/** A loop that was woken and is locked; nothing of it is read yet. */
interface Wake {
  readonly framework: string;
  readonly project: string;
  readonly loop: string;
  readonly dir: string;
  readonly isDryRun: boolean;
  /** Null in a dry run of a loop that has no lock file yet. */
  readonly lock: Deno.FsFile | null;
  /** Marks all processes of the tick's harnesses. */
  readonly runId: string;
  readonly startedAt: string;
  readonly summary: Summary;
  readonly stop: StopSignal;
}

/** A woken loop whose gate is open, with what its files say. */
interface OpenLoop extends Wake {
  readonly config: LoopConfig;
  readonly models: ModelsFile | null;
  readonly state: LoopState;
  /** The tick's number. */
  readonly number: number;
}

/** A loop and a folder: all that it takes to run something there. */
interface Workplace extends OpenLoop {
  readonly cwd: string;
}

/** Where a harness works. */
interface WorkFolder {
  readonly cwd: string;
  /** False for a folder that git does not know. */
  readonly isGit: boolean;
  /** The commit that changes are told against; null without one. */
  readonly base: string | null;
}

/** A tick with all that its roles need. */
interface Tick extends OpenLoop, WorkFolder {
  readonly task: TaskView;
  readonly windowTokens: number;
  readonly verdictNonce: string;
}

/** Set by a signal; whoever waits is woken. */
export interface StopSignal {
  signal: keyof typeof EXIT_CODES | null;
  readonly wake: Set<() => void>;
}

// --- Errors ---

/** Ends a tick before its save: nothing was done, and this is why. */
class SkipError extends Error {
  override name = "SkipError";
  constructor(readonly reason: SkipReason, message: string) {
    super(message);
  }
}

/** Ends a tick by a brake: `status --halt-loop` is called with it. */
class HaltError extends Error {
  override name = "HaltError";
  constructor(readonly haltReason: HaltReason, message: string, readonly skip: SkipReason | null) {
    super(message);
  }
}

/** Ends a tick whose harness did not do its work, which is counted. */
class HarnessFailure extends SkipError {
  override name = "HarnessFailure";
}

/** Ends a tick at a rate limit: no harness before a time. */
class BackoffError extends SkipError {
  override name = "BackoffError";
  constructor(readonly notBefore: string, message: string) {
    super("backoff", message);
  }
}

/** Ends a tick because the process was told to end. */
class StoppedError extends Error {
  override name = "StoppedError";
}

// --- Shared ---

// #region shared:cli
/** One option of a command line. The table of these drives parsing, `--help` and the tests. */
export interface OptionSpec {
  /** Long name without the dashes. */
  readonly name: string;
  /** Placeholder of the value in `--help`; absent for a switch. */
  readonly value?: string;
  readonly help: string;
}

/** A command line that cannot be understood: exit code 2. */
export class UsageError extends Error {
  override name = "UsageError";
}

/** A request that is understood and refused or that failed: exit code 1. */
export class RefusedError extends Error {
  override name = "RefusedError";
  /** @param hint What to do next, one command where there is one. */
  constructor(message: string, readonly hint: string) {
    super(message);
  }
}

/**
 * Counts the single-character edits between two short words (Levenshtein distance).
 *
 * @example
 * ```ts
 * import { editDistance } from "./status.ts";
 * if (editDistance("loop", "lop") !== 1) throw new Error("wrong distance");
 * ```
 */
export function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      const substituted = row[j - 1]! + (a[i - 1] === b[j - 1] ? 0 : 1);
      next.push(Math.min(row[j]! + 1, next[j - 1]! + 1, substituted));
    }
    row = next;
  }
  return row[b.length]!;
}

/**
 * Returns the candidate closest to a word, or null when none is within half of its length.
 *
 * @example
 * ```ts
 * import { findNearest } from "./status.ts";
 * if (findNearest("--lop", ["--loop", "--json"]) !== "--loop") throw new Error("not found");
 * ```
 */
export function findNearest(word: string, candidates: readonly string[]): string | null {
  let best: string | null = null;
  let bestDistance = Math.max(2, Math.floor(word.length / 2)) + 1;
  for (const candidate of candidates) {
    const distance = editDistance(word.slice(0, 64), candidate);
    if (distance < bestDistance) [best, bestDistance] = [candidate, distance];
  }
  return best;
}

function rejectUnknown(argument: string, options: readonly OptionSpec[]): never {
  if (!argument.startsWith("-")) {
    throw new UsageError(`Cannot read argument "${argument}": every value follows a flag`);
  }
  const flag = argument.split("=", 1)[0]!;
  const names = options.map((option) => `--${option.name}`);
  if (names.includes(flag)) {
    throw new UsageError(`Cannot read flag "${flag}": its value is missing`);
  }
  const nearest = findNearest(flag, names);
  const suggestion = nearest === null ? "see --help" : `did you mean ${nearest}?`;
  throw new UsageError(`Cannot read flag "${flag}": unknown (${suggestion})`);
}

/**
 * Reads a command line against a table of options.
 *
 * @returns The options given: a string for those with a value, true for switches.
 * @throws {UsageError} For an unknown flag, a missing value or a stray argument.
 *
 * @example
 * ```ts
 * import { parseCommandLine } from "./status.ts";
 * const options = [{ name: "loop", value: "NAME", help: "" }, { name: "json", help: "" }];
 * const given = parseCommandLine(["--loop=night", "--json"], options);
 * if (given.get("loop") !== "night" || given.get("json") !== true) throw new Error("misread");
 * ```
 */
export function parseCommandLine(
  args: readonly string[],
  options: readonly OptionSpec[],
): Map<string, string | true> {
  const valued = options.filter((option) => option.value !== undefined).map((o) => o.name);
  const switches = options.filter((option) => option.value === undefined).map((o) => o.name);
  const misused = switches.find((name) => args.some((word) => word.startsWith(`--${name}=`)));
  if (misused !== undefined) {
    throw new UsageError(`Cannot read flag "--${misused}": it takes no value`);
  }
  const parsed: Record<string, unknown> = parseArgs([...args], {
    string: [...valued, "_"],
    boolean: switches,
    unknown: (argument: string) => rejectUnknown(argument, options),
  });
  const strays = parsed._;
  if (Array.isArray(strays) && strays.length > 0) rejectUnknown(`${strays[0]}`, options);
  const given = new Map<string, string | true>();
  for (const name of valued) {
    const value = parsed[name];
    if (value === undefined) continue;
    if (typeof value !== "string" || value === "") {
      throw new UsageError(`Cannot read flag "--${name}": its value is missing`);
    }
    if (value.includes("\0")) throw new UsageError(`Cannot read flag "--${name}": a NUL byte`);
    given.set(name, value);
  }
  for (const name of switches) if (parsed[name] === true) given.set(name, true);
  return given;
}

/**
 * Reads an option's value as a whole number within bounds; undefined when it was not given.
 *
 * @example
 * ```ts
 * import { readWholeNumber } from "./status.ts";
 * const lines = readWholeNumber(new Map([["lines", "20"]]), "lines", { min: 1, max: 100 });
 * if (lines !== 20) throw new Error("misread");
 * ```
 */
export function readWholeNumber(
  given: ReadonlyMap<string, string | true>,
  name: string,
  { min, max }: { min: number; max: number },
): number | undefined {
  const text = given.get(name);
  if (text === undefined) return undefined;
  const value = /^\d{1,15}$/.test(`${text}`) ? Number(text) : NaN;
  if (value >= min && value <= max) return value;
  throw new UsageError(
    `Cannot read flag "--${name}": "${text}" is not a whole number from ${min} to ${max}`,
  );
}

/**
 * Lays out option lines for `--help`: flag and placeholder, then what it does.
 *
 * @example
 * ```ts
 * import { renderOptions } from "./status.ts";
 * const text = renderOptions([{ name: "lines", value: "N", help: "how many" }]);
 * if (text !== "  --lines N  how many\n") throw new Error(text);
 * ```
 */
export function renderOptions(options: readonly OptionSpec[]): string {
  const label = ({ name, value }: OptionSpec) =>
    `--${name}${value === undefined ? "" : ` ${value}`}`;
  const width = Math.max(...options.map((option) => label(option).length));
  return options.map((option) => `  ${label(option).padEnd(width)}  ${option.help}\n`).join("");
}

/** What to do about a failure; nothing for a usage error, whose one line says it all. */
function findHint(error: unknown): string | undefined {
  if (error instanceof UsageError) return undefined;
  if (error instanceof RefusedError) return error.hint;
  const isAboutContent = error instanceof SyntaxError || error instanceof TypeError;
  return isAboutContent
    ? "correct that file and try again"
    : "check who may read and write there, and that there is room left";
}

/** Prints how a program failed, in words on stderr and for `--json` as the last line of stdout. */
export function reportFailure(error: unknown, program: string, args: readonly string[]): number {
  const words = (error instanceof Error ? error.message : `${error}`).replace(/\p{Cc}+/gu, " ");
  // How Deno words what the system refused (2.6 and 2.9): "<problem> (os error <n>): <verb> '<path>'".
  const [, problem, verb, path] = /^(.+) \(os error \d+\): (\w+) '(.+)'$/.exec(words) ?? [];
  const message = path !== undefined
    ? `Cannot ${verb} "${path.replace("' -> '", '" to "')}": ${problem}`
    : words.startsWith("Cannot ")
    ? words
    : `Cannot go on: ${words}`;
  const hint = findHint(error);
  console.error(`${program}: ${message}`);
  if (hint !== undefined) console.error(`hint: ${hint}`);
  if (args.includes("--json")) {
    console.log(
      JSON.stringify({ schema_version: 1, ok: false, error: message, hint: hint ?? null }),
    );
  }
  return error instanceof UsageError ? 2 : 1;
}
// #endregion shared:cli

// #region shared:framework
/** What names of tasks, loops and templates look like; checked before a path is built from one. */
export const NAME_PATTERN = /^[a-z0-9][a-z0-9-]{0,62}$/;

/** Reads an environment variable; an empty one counts as absent. */
export function readEnv(name: string): string | undefined {
  return Deno.env.get(name) || undefined;
}

/** The checkout that holds scripts/, prompts/ and templates/ (also behind links, also compiled). */
export function findFrameworkDir(scriptUrl: string): string {
  const declared = readEnv("AUTOMATON_HOME");
  if (declared !== undefined) return resolve(declared);
  const program = Deno.build.standalone ? Deno.execPath() : fromFileUrl(scriptUrl);
  return dirname(dirname(Deno.realPathSync(program)));
}

/**
 * Finds the project folder: the flag, else AUTOMATON_PROJECT, else the nearest ancestor of the
 * working directory that holds `.automaton/`.
 *
 * @param mayCreate True for commands that make `.automaton/` in a project named outright.
 * @throws {RefusedError} Where there is no such folder.
 */
export function findProjectDir(flag: string | undefined, mayCreate: boolean): string {
  const named = flag ?? readEnv("AUTOMATON_PROJECT");
  if (named !== undefined) {
    const path = resolve(named);
    if (!isDirectory(path)) {
      throw new RefusedError(`Cannot open project "${path}": no such folder`, "check --project");
    }
    if (isProject(path)) return path;
    if (isDirectory(join(path, ".automaton"))) {
      throw new RefusedError(
        `Cannot open project "${path}": its .automaton is a checkout of Automaton`,
        "name another folder with --project",
      );
    }
    if (mayCreate) return path;
    throw new RefusedError(
      `Cannot open project "${path}": it holds no .automaton folder`,
      "status --create-task NAME --project DIR makes one",
    );
  }
  for (let path = Deno.cwd();; path = dirname(path)) {
    if (isProject(path)) return path;
    if (dirname(path) === path) break;
  }
  throw new RefusedError(
    `Cannot find a project from "${Deno.cwd()}": no folder above it holds .automaton`,
    "name it with --project DIR",
  );
}

/** True for a folder with a project's `.automaton`; a home folder may hold a checkout of that name. */
function isProject(path: string): boolean {
  const store = join(path, ".automaton");
  return isDirectory(store) && !isDirectory(join(store, "templates", "loops"));
}

/** True when a path leads to a folder; false when to anything else or nothing. */
export function isDirectory(path: string): boolean {
  try {
    return Deno.statSync(path).isDirectory;
  } catch {
    return false; // Missing, unreadable or a loop of links: not a folder that can be used.
  }
}

/** The framework's version from its config.md; "unknown" where that cannot be read. */
export function readVersion(frameworkDir: string): string {
  const text = readTextIfPresent(join(frameworkDir, "config.md")) ?? "";
  return /^version:\s*(\S+)/m.exec(text)?.[1] ?? "unknown";
}

/**
 * A file's text, or null when there is no such file.
 *
 * @throws {TypeError} For a folder, a pipe or a device, which may never end.
 */
export function readTextIfPresent(path: string): string | null {
  try {
    if (Deno.statSync(path).isFile) return Deno.readTextFileSync(path);
  } catch (error) {
    if (error instanceof Deno.errors.NotFound || error instanceof Deno.errors.NotADirectory) {
      return null;
    }
    throw error;
  }
  throw new TypeError(`Cannot read "${path}": it is no regular file`);
}
// #endregion shared:framework

// #region shared:fields
/**
 * One rule about a field of a JSON object: its dotted path (`*` stands for every key), what it must be
 * in words, the test, and whether it may be absent.
 */
export type FieldRule = readonly [
  path: string,
  want: string,
  holds: (value: unknown) => boolean,
  presence?: "required",
];

/**
 * True for a JSON object: not null, not an array.
 *
 * @example
 * ```ts
 * import { isRecord } from "./status.ts";
 * if (!isRecord({}) || isRecord([]) || isRecord(null)) throw new Error("wrong");
 * ```
 */
export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * Shortens any value to what fits in one line of an error message.
 *
 * @example
 * ```ts
 * import { describeValue } from "./status.ts";
 * if (describeValue({ a: [1] }) !== '{"a":[1]}') throw new Error("wrong");
 * ```
 */
export function describeValue(value: unknown): string {
  if (value === undefined) return "nothing";
  const text = JSON.stringify(value) ?? typeof value;
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}

function listAtPath(root: unknown, path: string): [string, unknown][] {
  let found: [string, unknown][] = [["", root]];
  for (const key of path.split(".")) {
    found = found.flatMap(([prefix, value]): [string, unknown][] => {
      if (!isRecord(value)) return [];
      const keys = key === "*" ? Object.keys(value) : [key];
      return keys.map((k) => [prefix === "" ? k : `${prefix}.${k}`, value[k]]);
    });
  }
  return found;
}

/**
 * Checks a parsed JSON value against rules. An absent optional field passes; null does not, unless
 * its rule holds for null.
 *
 * @throws {TypeError} Names the file, the field, what was found and what was wanted.
 *
 * @example
 * ```ts
 * import { checkFields, type FieldRule } from "./status.ts";
 * const rules: FieldRule[] = [["tick", "a number", (value) => typeof value === "number", "required"]];
 * checkFields({ tick: 1, more: true }, rules, "a file");
 * ```
 */
export function checkFields(
  root: unknown,
  rules: readonly FieldRule[],
  where: string,
): asserts root is Record<string, unknown> {
  if (!isRecord(root)) {
    throw new TypeError(`Cannot use "${where}": found ${describeValue(root)}, wanted an object`);
  }
  for (const [pattern, want, holds, presence] of rules) {
    for (const [path, value] of listAtPath(root, pattern)) {
      if (value === undefined ? presence === undefined : holds(value)) continue;
      throw new TypeError(
        `Cannot use "${where}": field ${path}: found ${describeValue(value)}, wanted ${want}`,
      );
    }
  }
}

/**
 * Parses JSON (or JSONC by `parse`) and says where it came from when it does not parse.
 *
 * @example
 * ```ts
 * import { parseJsonText } from "./status.ts";
 * if (parseJsonText("[1]", "a file")?.toString() !== "1") throw new Error("misread");
 * ```
 */
export function parseJsonText(
  text: string,
  where: string,
  parse: (text: string) => unknown = JSON.parse,
): unknown {
  const fail = (detail: string) => new SyntaxError(`Cannot parse "${where}": ${detail}`);
  if (text.length > MAX_JSON_CHARS) {
    throw fail(`it is larger than ${MAX_JSON_CHARS / 1024 / 1024} MiB`);
  }
  let value: unknown;
  try {
    value = parse(text.replace(/^\uFEFF/, ""));
  } catch (error) {
    if (error instanceof RangeError) throw fail(TOO_DEEP);
    // deno-lint-ignore no-control-regex -- the message quotes the text, whatever is in it.
    const words = (error as Error).message.replace(/[\u0000-\u001f\u007f-\u009f]+/g, "?");
    throw fail(text.trim() === "" ? "it is empty" : words);
  }
  const count = countFields(value);
  if (count === null) throw fail(TOO_DEEP);
  if ((text.match(/"\s*:/g)?.length ?? 0) !== count) {
    const field = findRepeatedField(text);
    if (field !== null) throw fail(`the field ${describeValue(field)} stands twice in one object`);
  }
  return value;
}

/** Larger and deeper than any file of ours; beyond, checking and saving would exhaust the memory. */
const MAX_JSON_CHARS = 32 * 1024 * 1024;
const MAX_JSON_DEPTH = 100;
const TOO_DEEP = `it is nested deeper than ${MAX_JSON_DEPTH} levels`;

/** How many fields the objects in a JSON value have; null when it is nested too deeply. */
function countFields(value: unknown, depth = 0): number | null {
  if (typeof value !== "object" || value === null) return 0;
  if (depth > MAX_JSON_DEPTH) return null;
  let count = Array.isArray(value) ? 0 : Object.keys(value).length;
  for (const inner of Object.values(value)) {
    const below = countFields(inner, depth + 1);
    if (below === null) return null;
    count += below;
  }
  return count;
}

/**
 * The first field that stands twice in one object; null when there is none. Readers differ in which of
 * the two counts, so neither does.
 *
 * @param text JSON or JSONC that has been parsed.
 */
function findRepeatedField(text: string): string | null {
  const open: (Set<string> | null)[] = [];
  let name = "";
  for (let at = 0; at < text.length; at++) {
    const char = text[at]!;
    if (char === '"') {
      const start = at;
      for (at++; at < text.length && text[at] !== '"'; at++) if (text[at] === "\\") at++;
      name = text.slice(start + 1, at);
    } else if (text.startsWith("//", at)) {
      const end = text.indexOf("\n", at);
      at = end < 0 ? text.length : end;
    } else if (text.startsWith("/*", at)) at = text.indexOf("*/", at + 2) + 1;
    else if (char === "{" || char === "[") open.push(char === "{" ? new Set() : null);
    else if (char === "}" || char === "]") open.pop();
    else if (char === ":") {
      if (open.at(-1)?.has(name)) return name;
      open.at(-1)?.add(name);
    }
  }
  return null;
}
// #endregion shared:fields

// #region shared:models
/** One model of models.json. */
export interface ModelEntry {
  readonly context_tokens?: number;
  readonly local?: boolean;
  readonly gguf?: string;
  readonly mmproj?: string;
  readonly kv_type?: string;
  readonly slots?: number;
}

/** models.json: which models there are and which of them count as the same. */
export interface ModelsFile {
  readonly path: string;
  readonly default?: string;
  readonly models: Readonly<Record<string, ModelEntry>>;
  readonly conflicts?: readonly (readonly [string, string])[];
}

const isPositiveInteger = (value: unknown): boolean =>
  Number.isSafeInteger(value) && Number(value) > 0;

// deno-fmt-ignore -- a table: one row a line.
const MODELS_RULES: readonly FieldRule[] = [
  ["models", "an object of models", isRecord, "required"],
  ["models.*", "an object", isRecord],
  ["models.*.context_tokens", "a whole number above 0", isPositiveInteger],
  ["models.*.local", "true or false", (v) => typeof v === "boolean"],
  ["models.*.gguf", "a path", (v) => typeof v === "string" && v !== ""],
  ["models.*.mmproj", "a path", (v) => typeof v === "string" && v !== ""],
  ["models.*.kv_type", "a type's name", (v) => typeof v === "string"],
  ["models.*.slots", "a whole number above 0", isPositiveInteger],
  ["default", "a model's name", (v) => typeof v === "string" && v !== ""],
  ["conflicts", "a list of pairs of model names", (v) => Array.isArray(v) && v.every((pair) => Array.isArray(pair) && pair.length === 2 && pair.every((name) => typeof name === "string") )],
];

/**
 * Reads `<project>/.automaton/models.json`, else `<framework>/models.json` (JSONC accepted).
 *
 * @returns null when there is neither.
 * @throws {SyntaxError|TypeError} For a file that is there and cannot be used.
 */
export function readModels(projectDir: string, frameworkDir: string): ModelsFile | null {
  const candidates = [
    join(projectDir, ".automaton", "models.json"),
    join(frameworkDir, "models.json"),
  ];
  for (const path of candidates) {
    const text = readTextIfPresent(path);
    if (text === null) continue;
    const parsed = parseJsonText(text, path, parseJsonc);
    checkFields(parsed, MODELS_RULES, path);
    const fields = parsed as unknown as Omit<ModelsFile, "path">;
    return { ...fields, path };
  }
  return null;
}
// #endregion shared:models

// #region shared:save
/**
 * Replaces a file whole: a temporary beside it, fsync, rename, fsync of the folder. After a crash at
 * any point the file holds the old content or the new.
 */
export function writeFileAtomic(path: string, text: string): void {
  replaceFiles([path], text);
}

/** Gives files of one folder the same content; where there is no room for all of them none changes. */
function replaceFiles(paths: readonly string[], text: string): void {
  const pairs = paths.map((path) => ({
    path,
    temporary: join(dirname(path), `.${basename(path)}.tmp-${Deno.pid}`),
  }));
  try {
    for (const { temporary } of pairs) writeSynced(temporary, text);
    for (const { path, temporary } of pairs) Deno.renameSync(temporary, path);
  } catch (error) {
    for (const { temporary } of pairs) {
      try {
        Deno.removeSync(temporary);
      } catch {
        // Nothing was left behind; the first error is the one to tell.
      }
    }
    throw error;
  }
  syncDirectory(dirname(paths[0]!));
}

/** True for a file, a folder or a link, also one that leads nowhere. */
export function isAnythingAt(path: string): boolean {
  try {
    return Deno.lstatSync(path) !== null;
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return false;
    throw error;
  }
}

function writeSynced(path: string, text: string): void {
  // What lies there, a link or a pipe say, is neither followed nor waited for.
  if (isAnythingAt(path) && !isDirectory(path)) Deno.removeSync(path);
  const file = Deno.openSync(path, { write: true, createNew: true });
  try {
    const bytes = new TextEncoder().encode(text);
    for (let done = 0; done < bytes.length;) done += file.writeSync(bytes.subarray(done));
    file.syncSync();
  } finally {
    file.close();
  }
}

/** Makes a rename in a folder durable where the platform can (Windows opens no folders). */
export function syncDirectory(path: string): void {
  if (Deno.build.os === "windows") return;
  const folder = Deno.openSync(path, { read: true });
  try {
    folder.syncSync();
  } catch {
    // Some file systems (FUSE, network) refuse to sync a folder; the rename itself has happened.
  } finally {
    folder.close();
  }
}

/**
 * Saves a state file and its `.bak`, both whole and with the same content. The copy goes first, so that
 * it is never older than the state: counters that are restored from it do not go back.
 */
export function saveState(path: string, state: Readonly<Record<string, unknown>>): void {
  replaceFiles([`${path}.bak`, path], `${JSON.stringify(state, null, 2)}\n`);
}
// #endregion shared:save

// #region shared:lock
/** Waits; a timer is started only when somebody really has to wait. */
export function sleep(milliseconds: number): Promise<void> {
  return new Promise((wake) => setTimeout(wake, milliseconds));
}

/**
 * Takes an exclusive kernel lock (flock) on a file, which is made when missing and never unlinked.
 * The kernel frees it when the process ends, however it ends.
 *
 * @param timeoutMs How long to wait for another holder; 0 tries once.
 * @returns The open file that holds the lock until it is closed, or null when somebody else holds it.
 */
export async function acquireLock(path: string, timeoutMs: number): Promise<Deno.FsFile | null> {
  // A clock of its own: the system's may be set while somebody waits.
  const deadline = performance.now() + timeoutMs;
  while (true) {
    const file = Deno.openSync(path, { read: true, write: true, create: true });
    const isOurs = await tryLock(file, Math.max(0, deadline - performance.now()));
    if (isOurs && isSameFile(file, path)) return file;
    if (isOurs !== null) file.close();
    if (isOurs !== true) {
      if (performance.now() >= deadline) return null;
      await sleep(50);
    }
  }
}

/** @returns true: locked; false: held elsewhere; null: still waiting in the kernel (Deno 2.6). */
async function tryLock(file: Deno.FsFile, timeoutMs: number): Promise<boolean | null> {
  const lockable = file as Deno.FsFile & { tryLockSync?: (exclusive: boolean) => boolean };
  if (lockable.tryLockSync !== undefined) return lockable.tryLockSync(true);
  // Deno before 2.7 has only the blocking call: race it, and give the lock back if it comes late.
  let isAbandoned = false;
  const locked = file.lock(true).then(() => {
    if (isAbandoned) file.close();
    return true;
  });
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<null>((resolveLate) => {
    timer = setTimeout(() => resolveLate(null), Math.max(100, timeoutMs));
  });
  const outcome = await Promise.race([locked, late]);
  clearTimeout(timer);
  isAbandoned = outcome === null;
  return outcome;
}

/** A folder may have been moved or made anew between opening its lock file and locking it. */
function isSameFile(file: Deno.FsFile, path: string): boolean {
  try {
    const [held, named] = [file.statSync(), Deno.statSync(path)];
    return held.ino === named.ino && held.dev === named.dev;
  } catch {
    return false; // The path leads nowhere any more: open it again.
  }
}

/** What a tick writes into `.state.lock` for people and for the next tick. */
export interface LockNote {
  readonly pid: number;
  readonly host: string;
  readonly loop: string;
  readonly started_at: string;
  /** Marker of the harness's processes in their environment. */
  readonly run_id: string | null;
  /** What that harness was told of its role and its task; null where it has none. */
  readonly role: string | null;
  readonly task: string | null;
  /** The harness's process group and when its leader started (platform's own words). */
  readonly harness_pgid: number | null;
  readonly harness_started: string | null;
}

/** Reads the note in a lock file; null when there is none or it is torn. */
export function readLockNote(path: string): LockNote | null {
  try {
    const note: unknown = JSON.parse(readTextIfPresent(path) ?? "");
    return isRecord(note) && typeof note.pid === "number" ? note as unknown as LockNote : null;
  } catch {
    return null; // Empty or half-written: the kernel lock alone decides, the note only informs.
  }
}

/** The mark that a run's processes inherit as their limit of file locks: 48 bits of the run's id. */
export function markLimit(runId: string): string {
  return `${parseInt(runId.replaceAll("-", "").slice(0, 12), 16)}`;
}
// #endregion shared:lock

// #region shared:loop-state
/** Why a loop is halted. */
export const HALT_REASONS = [
  "iterations_exhausted",
  "budget_exhausted",
  "verifier_failed",
  "drift_detected",
  "human_intervention",
] as const;
/** One of HALT_REASONS. */
export type HaltReason = typeof HALT_REASONS[number];

/** A verifier's verdict on one tick. */
export interface Verdict {
  readonly pass: boolean | null;
  readonly score: number;
  readonly reasons: readonly string[];
  readonly next_hint?: string;
}

/** `.state.loop`: everything a loop remembers between ticks; unknown fields are kept. */
export interface LoopState {
  schema_version: 1;
  name: string;
  status: "running" | "halted" | "paused" | "complete";
  halt_reason: HaltReason | null;
  iteration_count: number;
  resumed_count: number;
  last_tick_at: string;
  last_verdict: Verdict | null;
  score_history: number[];
  current_task: string | null;
  worktree_branch: string | null;
  worktree_path: string | null;
  /** iteration_count at the last approval: the allowance counts from there. */
  iteration_base?: number;
  base_branch?: string | null;
  base_commit?: string | null;
  consecutive_failures?: number;
  /** No harness before this time (rate limit). */
  not_before?: string | null;
  /** Beside score_history: which of those ticks passed. */
  pass_history?: boolean[];
  last_slot?: string | null;
  [unknownField: string]: unknown;
}

const isCount = (value: unknown): boolean => Number.isSafeInteger(value) && Number(value) >= 0;
const isText = (value: unknown): boolean => typeof value === "string";
const isTextOrNull = (value: unknown): boolean => value === null || isText(value);
const isNameOrNull = (value: unknown): boolean =>
  value === null || (typeof value === "string" && NAME_PATTERN.test(value));
const isTimeOrNull = (value: unknown): boolean =>
  value === null || (typeof value === "string" && !Number.isNaN(Date.parse(value)));
const isOneOf = (words: readonly unknown[]) => (value: unknown): boolean => words.includes(value);
const isListOf = (holds: (item: unknown) => boolean) => (value: unknown): boolean =>
  Array.isArray(value) && value.every(holds);

// deno-fmt-ignore -- a table: one row a line.
const LOOP_STATE_RULES: readonly FieldRule[] = [
  ["name", "a loop's name", isText, "required"],
  ["status", "running, halted, paused or complete", isOneOf(["running", "halted", "paused", "complete"]), "required"],
  ["halt_reason", `null or one of ${HALT_REASONS.join(", ")}`, isOneOf([null, ...HALT_REASONS]), "required"],
  ["iteration_count", "a whole number", isCount, "required"],
  ["resumed_count", "a whole number", isCount, "required"],
  ["last_tick_at", "a time", isTimeOrNull, "required"],
  ["last_verdict", "a verdict or null", (v) => v === null || isRecord(v), "required"],
  ["score_history", "a list of numbers", isListOf((v) => typeof v === "number"), "required"],
  ["current_task", "a task's name or null", isNameOrNull, "required"],
  ["worktree_branch", "a branch or null", isTextOrNull, "required"],
  ["worktree_path", "a path or null", isTextOrNull, "required"],
  ["iteration_base", "a whole number", isCount],
  ["base_branch", "a branch or null", isTextOrNull],
  ["base_commit", "a commit or null", isTextOrNull],
  ["consecutive_failures", "a whole number", isCount],
  ["not_before", "a time or null", isTimeOrNull],
  ["pass_history", "a list of true and false", isListOf((v) => typeof v === "boolean")],
  ["last_slot", "a time or null", isTimeOrNull],
];

/** A state file written by a newer edition: never touched by this one. */
export class NewerSchemaError extends RefusedError {
  override name = "NewerSchemaError";
  constructor(message: string) {
    super(message, "update Automaton");
  }
}

/**
 * Throws unless a state file's `schema_version` is the one that this edition reads and writes.
 *
 * @example
 * ```ts
 * import { checkSchemaVersion } from "./status.ts";
 * checkSchemaVersion({ schema_version: 1 }, "a file");
 * ```
 */
export function checkSchemaVersion(parsed: unknown, where: string): void {
  const found = isRecord(parsed) ? parsed.schema_version : undefined;
  if (found === 1) return;
  if (typeof found === "number" && found > 1) {
    throw new NewerSchemaError(
      `Cannot use "${where}": schema_version ${found} is newer than 1, which this edition reads`,
    );
  }
  throw new TypeError(
    `Cannot use "${where}": field schema_version: found ${describeValue(found)}, wanted 1`,
  );
}

/**
 * Parses the text of a `.state.loop`.
 *
 * @throws {SyntaxError|TypeError|NewerSchemaError} Names the file and the field.
 *
 * @example
 * ```ts
 * import { parseLoopState } from "./status.ts";
 * let message = "";
 * try {
 *   parseLoopState('{"schema_version": 1, "name": 7}', "a file");
 * } catch (error) {
 *   message = (error as Error).message;
 * }
 * if (!message.includes("field name: found 7")) throw new Error(message);
 * ```
 */
export function parseLoopState(text: string, where: string): LoopState {
  const parsed = parseJsonText(text, where);
  checkSchemaVersion(parsed, where);
  checkFields(parsed, LOOP_STATE_RULES, where);
  const state = parsed as unknown as LoopState;
  const { iteration_base: base = 0, iteration_count: count } = state;
  if (base <= count) return state;
  throw new TypeError(
    `Cannot use "${where}": field iteration_base: found ${base}, wanted at most iteration_count, ${count}`,
  );
}
// #endregion shared:loop-state

// #region shared:loop-config
/** One role of a loop; null where the built-in behaviour is meant. */
export interface RoleConfig {
  readonly prompt?: string;
  /** Prompt budget in tokens. */
  readonly tier?: number;
  readonly model?: string;
  readonly command?: readonly string[];
  /** Over harness.env. */
  readonly env?: Readonly<Record<string, string>>;
}

/** The roles of a tick, in order. */
export type RoleName = "implement" | "verify" | "orchestrate";

/**
 * Where a harness's JSON output says what a run cost and came to. Paths are dotted; `*` stands for every
 * item of a list.
 */
export interface UsageConfig {
  /** Only lines with these texts at these paths are read. */
  readonly where?: Readonly<Record<string, string>>;
  /** Read the last JSON line alone, or every JSON line and add the numbers up. */
  readonly combine?: "last" | "sum";
  readonly cost_usd?: string;
  readonly input_tokens?: string;
  readonly output_tokens?: string;
  /** The answer's text, which then is what a verdict is looked for in. */
  readonly text?: string;
  /** What went wrong: a text there in the last such line makes the run a failed one. */
  readonly error?: string;
}

/** loop.json as written; every field is optional and has its default where it is used. */
export interface LoopConfig {
  readonly name?: string;
  readonly description?: string;
  readonly work_source?: {
    readonly kind?: string;
    readonly project?: string;
    readonly area?: string;
  };
  readonly roles?: Readonly<Partial<Record<RoleName, RoleConfig | null>>>;
  readonly brakes?: {
    readonly max_iterations?: number;
    readonly max_budget_usd?: number | null;
    readonly score_plateau_window?: number;
    readonly max_consecutive_failures?: number;
  };
  readonly blast_radius?: {
    readonly worktree?: boolean;
    readonly file_scope?: readonly string[];
    readonly base?: string;
    readonly commit?: "on_pass" | "always" | "never";
  };
  readonly checks?: readonly (readonly string[])[];
  readonly acceptance_criteria?: string | readonly string[];
  readonly harness?: {
    readonly command?: readonly string[];
    /** Put after a command that does not hold {model} itself, where a model is known. */
    readonly model_args?: readonly string[];
    readonly prompt_var?: string;
    readonly cwd_var?: string;
    readonly output_var?: string;
    readonly stdin?: "none" | "prompt";
    readonly timeout_seconds?: number;
    readonly idle_timeout_seconds?: number;
    readonly env?: Readonly<Record<string, string>>;
    readonly unset_env?: readonly string[];
    readonly backoff?: {
      readonly patterns?: readonly string[];
      readonly exit_codes?: readonly number[];
      readonly seconds?: number;
    };
    readonly usage?: UsageConfig;
  };
  readonly outputs?: { readonly retention?: number };
  readonly schedule?: { readonly kind?: string; readonly interval_seconds?: number };
  readonly hooks?: {
    readonly on_halt?: readonly string[];
    readonly on_complete?: readonly string[];
  };
  readonly allowed_phases?: readonly string[];
}

/** Defaults of the fields that more than one program reads. */
export const LOOP_DEFAULTS = {
  maxIterations: 10,
  plateauWindow: 3,
  maxConsecutiveFailures: 3,
  intervalSeconds: 3600,
  backoffSeconds: 900,
  allowedPhases: ["research", "design", "spec", "implement", "code_review", "bug_hunt"],
} as const;

const isNumberFrom = (min: number) => (value: unknown): boolean =>
  typeof value === "number" && Number.isFinite(value) && value >= min;
const isIntegerFrom = (min: number) => (value: unknown): boolean =>
  Number.isSafeInteger(value) && Number(value) >= min;
const isArgv = (value: unknown): boolean =>
  isListOf((item) => typeof item === "string" && !item.includes("\0"))(value) &&
  (value as string[]).length > 0 && (value as string[])[0] !== "";
const isRecordOrNull = (value: unknown): boolean => value === null || isRecord(value);
const isEnvName = (name: unknown): boolean => typeof name === "string" && /^[^=\0]+$/.test(name);
const isEnvironment = (value: unknown): boolean =>
  isRecord(value) && Object.keys(value).every(isEnvName) &&
  Object.values(value).every((text) => typeof text === "string" && !text.includes("\0"));
const isPattern = (value: unknown): boolean => {
  if (typeof value !== "string") return false;
  try {
    return Boolean(new RegExp(value, "i"));
  } catch {
    return false; // Not a regular expression.
  }
};
const isScopePath = (value: unknown): boolean =>
  typeof value === "string" && value !== "" && !/^([/\\]|[A-Za-z]:)|\0/.test(value) &&
  !value.split(/[/\\]/).includes("..");

// deno-fmt-ignore -- a table: one row a line.
const LOOP_CONFIG_RULES: readonly FieldRule[] = [
  ["$schema", "a text", isText],
  ["name", "a loop's name", (v) => isNameOrNull(v) && v !== null],
  ["description", "a text", isText],
  ["work_source", "an object", isRecord],
  ["work_source.kind", "a text", isText],
  ["work_source.project", "a path", (v) => isText(v) && v !== ""],
  ["work_source.area", "a folder's name below design/", (v) => isScopePath(v)],
  ["roles", "an object", isRecord],
  ["roles.implement", "an object or null", isRecordOrNull],
  ["roles.verify", "an object or null", isRecordOrNull],
  ["roles.orchestrate", "an object or null", isRecordOrNull],
  ["roles.*.prompt", "a file's name or a text", (v) => isText(v) && v !== ""],
  ["roles.*.tier", "a whole number from 4000", isIntegerFrom(4000)],
  ["roles.*.model", "a model's name", (v) => isText(v) && v !== ""],
  ["roles.*.command", "a list of texts, the first not empty", isArgv],
  ["roles.*.env", "an object of texts", isEnvironment],
  ["brakes", "an object", isRecord],
  ["brakes.max_iterations", "a whole number from 1", isIntegerFrom(1)],
  ["brakes.max_budget_usd", "a number from 0 or null", (v) => v === null || isNumberFrom(0)(v)],
  ["brakes.score_plateau_window", "a whole number from 2", isIntegerFrom(2)],
  ["brakes.max_consecutive_failures", "a whole number from 1", isIntegerFrom(1)],
  ["blast_radius", "an object", isRecord],
  ["blast_radius.worktree", "true or false", (v) => typeof v === "boolean"],
  ["blast_radius.file_scope", "a list of paths without .. inside the project", isListOf(isScopePath)],
  ["blast_radius.base", "a branch", (v) => typeof v === "string" && /^[^-]/.test(v)],
  ["blast_radius.commit", "on_pass, always or never", isOneOf(["on_pass", "always", "never"])],
  ["checks", "a list of commands, each a list of texts", isListOf(isArgv)],
  ["acceptance_criteria", "a text or a list of texts", (v) => isText(v) || isListOf(isText)(v)],
  ["harness", "an object", isRecord],
  ["harness.command", "a list of texts, the first not empty", isArgv],
  ["harness.model_args", "a list of texts", isListOf((v) => typeof v === "string" && !v.includes("\0"))],
  ["harness.prompt_var", "a token", (v) => isText(v) && v !== ""],
  ["harness.cwd_var", "a token", (v) => isText(v) && v !== ""],
  ["harness.output_var", "a token", (v) => isText(v) && v !== ""],
  ["harness.stdin", "none or prompt", isOneOf(["none", "prompt"])],
  ["harness.timeout_seconds", "a number from 0", isNumberFrom(0)],
  ["harness.idle_timeout_seconds", "a number from 0", isNumberFrom(0)],
  ["harness.env", "an object of texts", isEnvironment],
  ["harness.unset_env", "a list of names", isListOf(isEnvName)],
  ["harness.backoff", "an object", isRecord],
  ["harness.backoff.patterns", "a list of regular expressions", isListOf(isPattern)],
  ["harness.backoff.exit_codes", "a list of whole numbers", isListOf((v) => Number.isSafeInteger(v))],
  ["harness.backoff.seconds", "a number from 1", isNumberFrom(1)],
  ["harness.usage", "an object", isRecord],
  ["harness.usage.where", "an object of texts", (v) => isRecord(v) && Object.values(v).every(isText)],
  ["harness.usage.combine", "last or sum", isOneOf(["last", "sum"])],
  ["harness.usage.cost_usd", "a dotted path", (v) => isText(v) && v !== ""],
  ["harness.usage.input_tokens", "a dotted path", (v) => isText(v) && v !== ""],
  ["harness.usage.output_tokens", "a dotted path", (v) => isText(v) && v !== ""],
  ["harness.usage.text", "a dotted path", (v) => isText(v) && v !== ""],
  ["harness.usage.error", "a dotted path", (v) => isText(v) && v !== ""],
  ["outputs", "an object", isRecord],
  ["outputs.retention", "a whole number", (v) => Number.isSafeInteger(v)],
  ["schedule", "an object", isRecord],
  ["schedule.kind", "a text", isText],
  ["schedule.interval_seconds", "a whole number from 1", isIntegerFrom(1)],
  ["hooks", "an object", isRecord],
  ["hooks.on_halt", "a list of texts, the first not empty", isArgv],
  ["hooks.on_complete", "a list of texts, the first not empty", isArgv],
  ["allowed_phases", "a list of phases", isListOf(isOneOf([...LOOP_DEFAULTS.allowedPhases, "complete", "human_intervention"]))],
];

/** Fields with keys of their own making: nothing below them is unknown. */
const OPEN_FIELDS = [
  "harness.env",
  "harness.usage.where",
  "roles.implement.env",
  "roles.verify.env",
  "roles.orchestrate.env",
];

function listUnknownKeys(value: unknown, prefix: string, known: readonly string[]): string[] {
  if (!isRecord(value) || OPEN_FIELDS.includes(prefix)) return [];
  return Object.entries(value).flatMap(([key, below]) => {
    const path = prefix === "" ? key : `${prefix}.${key}`;
    if (known.includes(path)) return listUnknownKeys(below, path, known);
    const nearest = findNearest(path, known);
    return [
      `unknown field ${path} in loop.json${nearest === null ? "" : ` (did you mean ${nearest}?)`}`,
    ];
  });
}

/**
 * Parses loop.json (JSONC) and checks every field that a loop knows.
 *
 * @returns The configuration and a warning for each unknown key.
 * @throws {SyntaxError|TypeError} Names the file, the field, what was found and what was wanted.
 *
 * @example
 * ```ts
 * import { parseLoopConfig } from "./status.ts";
 * const { warnings } = parseLoopConfig('{"brakes": {"max_iteratons": 3}, // a slip\n}', "loop.json");
 * if (!warnings[0]?.includes("did you mean brakes.max_iterations?")) throw new Error(warnings[0]);
 * ```
 */
export function parseLoopConfig(
  text: string,
  where: string,
): { config: LoopConfig; warnings: string[] } {
  const parsed = parseJsonText(text, where, parseJsonc);
  checkFields(parsed, LOOP_CONFIG_RULES, where);
  const known = LOOP_CONFIG_RULES.flatMap(([path]) =>
    path.startsWith("roles.*.")
      ? ["implement", "verify", "orchestrate"].map((role) => path.replace("*", role))
      : [path]
  );
  return { config: parsed as LoopConfig, warnings: listUnknownKeys(parsed, "", known) };
}
// #endregion shared:loop-config

// #region shared:scope
/**
 * True when a path, relative to the worktree and with `/`, lies in a loop's file scope.
 *
 * @param scope Files and folders; undefined means no limit, an empty list that nothing may change.
 *
 * @example
 * ```ts
 * import { isInScope } from "./status.ts";
 * if (!isInScope("src/a.ts", ["src/"]) || isInScope("srcs/a.ts", ["src"])) throw new Error("scope");
 * ```
 */
export function isInScope(path: string, scope: readonly string[] | undefined): boolean {
  if (scope === undefined) return true;
  return scope.some((entry) => {
    const parts = entry.split(/[/\\]/).filter((part) => part !== "" && part !== ".");
    const allowed = parts.join("/");
    return allowed === "" || path === allowed || path.startsWith(`${allowed}/`);
  });
}
// #endregion shared:scope

// #region shared:log
const LOG_LIMIT_BYTES = 5 * 1024 * 1024;
const LOG_KEPT = 3;

/** Appends one line to a loop's `.state.log`; at 5 MiB the file is rotated and three are kept. */
export function appendLog(
  loopDir: string,
  level: "INFO" | "WARNING" | "ERROR",
  event: string,
  fields: Readonly<Record<string, unknown>>,
): void {
  const path = join(loopDir, ".state.log");
  const line = `${JSON.stringify({ at: new Date().toISOString(), level, event, ...fields })}\n`;
  try {
    const { isFile, size } = Deno.statSync(path);
    // Opening a pipe that nobody reads would never end.
    if (!isFile) throw new TypeError(`Cannot write "${path}": it is no regular file`);
    if (size + line.length > LOG_LIMIT_BYTES) rotateLog(path);
  } catch (error) {
    if (!(error instanceof Deno.errors.NotFound)) throw error;
  }
  Deno.writeTextFileSync(path, line, { append: true });
}

function rotateLog(path: string): void {
  for (let number = LOG_KEPT; number >= 1; number--) {
    const from = number === 1 ? path : `${path}.${number - 1}`;
    if (existsSync(from)) Deno.renameSync(from, `${path}.${number}`);
  }
}
// #endregion shared:log

// #region shared:process
/** Variables by which git would act on another repository than the one in the folder it is given. */
const GIT_REPOSITORY_VARIABLES = [
  "GIT_DIR",
  "GIT_WORK_TREE",
  "GIT_INDEX_FILE",
  "GIT_OBJECT_DIRECTORY",
  "GIT_ALTERNATE_OBJECT_DIRECTORIES",
  "GIT_COMMON_DIR",
  "GIT_PREFIX",
  "GIT_NAMESPACE",
];

/** Forgets inherited git variables, as when a program is started from a git hook. */
export function clearGitEnvironment(): void {
  for (const name of GIT_REPOSITORY_VARIABLES) Deno.env.delete(name);
}

/** What a finished command left: exit code (null when it could not be started), streams, words. */
export interface CommandOutcome {
  readonly code: number | null;
  readonly stdout: Uint8Array;
  readonly stderr: string;
}

/** How a command is run; what is absent is inherited. */
export interface CommandOptions {
  readonly cwd?: string;
  readonly env?: Record<string, string>;
  readonly timeoutMs?: number;
  /** Ended by Ctrl-C with its caller, and killed alone; else all that it starts is killed with it. */
  readonly isTerminalOurs?: boolean;
}

/**
 * Runs a command without a shell and with a deadline.
 *
 * @returns code null with the reason in stderr when it could not start or was killed at the deadline.
 */
export async function runCommand(
  argv: readonly string[],
  options: CommandOptions = {},
): Promise<CommandOutcome> {
  const { timeoutMs = 60_000, isTerminalOurs = false, ...spawnOptions } = options;
  const detached = Deno.build.os !== "windows" && !isTerminalOurs;
  let child: Deno.ChildProcess;
  try {
    child = new Deno.Command(argv[0]!, {
      args: argv.slice(1),
      ...spawnOptions,
      stdin: "null",
      stdout: "piped",
      stderr: "piped",
      detached,
    }).spawn();
  } catch (error) {
    return { code: null, stdout: new Uint8Array(), stderr: (error as Error).message };
  }
  let timer: ReturnType<typeof setTimeout> | undefined;
  const deadline = new Promise<null>((expire) => {
    timer = setTimeout(() => expire(null), timeoutMs);
  });
  const output = await Promise.race([child.output(), deadline]);
  clearTimeout(timer);
  if (output !== null) {
    const { code, stdout, stderr } = output;
    return { code, stdout, stderr: new TextDecoder().decode(stderr).trim() };
  }
  if (detached) killGroup(child.pid);
  else child.kill("SIGKILL");
  const stderr = `no answer from ${argv[0]} within ${timeoutMs / 1000} s`;
  return { code: null, stdout: new Uint8Array(), stderr };
}

/** Kills the leader of a process group with all that it has started; on Windows itself alone. */
export function killGroup(pid: number): void {
  try {
    Deno.kill(Deno.build.os === "windows" ? pid : -pid, "SIGKILL");
  } catch {
    // It ended in the same moment.
  }
}

const GIT_FLAGS = [
  "--no-optional-locks",
  "-c",
  "core.fsmonitor=false",
  "-c",
  "core.quotepath=false",
  "-c",
  "core.commitGraph=false",
] as const;
/** Replaced objects, grafts and a commit graph can tell other parents than the commits have. */
const GIT_ENV = {
  GIT_TERMINAL_PROMPT: "0",
  GIT_NO_REPLACE_OBJECTS: "1",
  GIT_GRAFT_FILE: "/dev/null",
  LC_ALL: "C",
} as const;

/** Runs git in a folder: no pager, no prompt, no lock taken only to refresh, no file monitor. */
export function runGit(
  cwd: string,
  args: readonly string[],
  options: CommandOptions = {},
): Promise<CommandOutcome> {
  const env = { ...GIT_ENV, ...options.env };
  return runCommand(["git", ...GIT_FLAGS, ...args], { cwd, isTerminalOurs: true, ...options, env });
}

/** The full name of a branch, or of what else a loop starts from: a tag of that name would go before it. */
export async function findFullRef(cwd: string, name: string): Promise<string> {
  for (const full of [`refs/heads/${name}`, `refs/remotes/${name}`]) {
    const { code } = await runGit(cwd, ["rev-parse", "--verify", "-q", `${full}^{commit}`]);
    if (code === 0) return full;
  }
  return name;
}
// #endregion shared:process

// --- Helpers ---

/**
 * Cuts a text to a number of tokens (4 characters each) and marks the cut.
 *
 * @returns The text itself when it fits; never half of a surrogate pair.
 *
 * @example
 * ```ts
 * import { truncateTokens } from "./loop-runner.ts";
 * if (truncateTokens("abcdefgh", 1) !== "abcd …[truncated]") throw new Error("wrong cut");
 * ```
 */
export function truncateTokens(text: string, maxTokens: number): string {
  return truncateText(text, maxTokens * CHARS_PER_TOKEN);
}

function truncateText(text: string, maxChars: number): string {
  if (text.length <= maxChars) return text;
  const isInPair = /[\uD800-\uDBFF]/.test(text.charAt(maxChars - 1));
  return text.slice(0, isInPair ? maxChars - 1 : maxChars) + TRUNCATION_MARK;
}

/**
 * Replaces tokens in one pass, so that a value that holds a token stays as it is.
 *
 * @param values By token, braces included; tokens without a value stay.
 *
 * @example
 * ```ts
 * import { substituteTokens } from "./loop-runner.ts";
 * const text = substituteTokens("{a}{b}{c}", { "{a}": "{b}", "{b}": "2" });
 * if (text !== "{b}2{c}") throw new Error(text);
 * ```
 */
export function substituteTokens(
  template: string,
  values: Readonly<Record<string, string>>,
): string {
  const tokens = Object.keys(values).sort((a, b) => b.length - a.length);
  if (tokens.length === 0) return template;
  const escaped = tokens.map((token) => token.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return template.replace(new RegExp(escaped.join("|"), "g"), (token) => values[token]!);
}

/**
 * Makes a task name out of a text; null when nothing of it can stand in one.
 *
 * @example
 * ```ts
 * import { slugify } from "./loop-runner.ts";
 * if (slugify("Fix: the **Parser**!") !== "fix-the-parser") throw new Error("wrong slug");
 * ```
 */
export function slugify(text: string): string | null {
  const plain = text.normalize("NFKD").replace(/\p{M}+/gu, "").toLowerCase()
    .replace(/[^a-z0-9]+/g, "-");
  const slug = plain.replace(/^-+/, "").slice(0, 63).replace(/-+$/, "");
  return NAME_PATTERN.test(slug) ? slug : null;
}

/**
 * The slot of a wake when it is due for a tick. Slots are the schedule's own times, so that a wake that
 * comes some seconds late does not shift those after it.
 *
 * @param lastSlotMs The slot of the last tick; null before the first. One in the future counts for nothing.
 * @param zoneOffsetMs By how much local time, by which calendars fire, is ahead of UTC.
 * @returns Milliseconds since the epoch, or null when the tick is not due yet.
 *
 * @example
 * ```ts
 * import { findDueSlot } from "./loop-runner.ts";
 * const check = { intervalMs: 90_000, periodMs: 60_000 };
 * const wake = { nowMs: 121_000, lastSlotMs: 60_000, zoneOffsetMs: 0 };
 * if (findDueSlot(check, wake) !== null) throw new Error("60 s is too early");
 * ```
 */
export function findDueSlot(
  { intervalMs, periodMs }: DueCheck,
  wake: { nowMs: number; lastSlotMs: number | null; zoneOffsetMs: number },
): number | null {
  const localSlot = Math.round((wake.nowMs + wake.zoneOffsetMs) / periodMs) * periodMs;
  const slotMs = localSlot - wake.zoneOffsetMs;
  const { lastSlotMs } = wake;
  const isDue = lastSlotMs === null || lastSlotMs > slotMs || slotMs >= lastSlotMs + intervalMs;
  return isDue ? slotMs : null;
}

/** Quotes words for sh, so that a harness can paste them as one command line. */
export function quoteForSh(words: readonly string[]): string {
  return words.map((word) =>
    /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`
  )
    .join(" ");
}

/**
 * The open items of a BACKLOG.md, from the top.
 *
 * @returns Each item's task name (its bold words, else its text; null where neither gives one) and text.
 */
export function listBacklogItems(text: string): { name: string | null; text: string }[] {
  return [...text.matchAll(/^\s*[-*] \[ \] +(.+?)\s*$/gm)].map(([, item]) => ({
    name: slugify(/\*\*(.+?)\*\*/.exec(item!)?.[1] ?? item!),
    text: item!.replaceAll("**", ""),
  }));
}

/** Makes one line of a text, without control characters. */
function toOneLine(text: string): string {
  // deno-lint-ignore no-control-regex -- they are what is taken out.
  return text.replace(/[\s\u0000-\u001f\u007f-\u009f]+/g, " ").trim();
}

/** What a text says as JSON; null where it is none. */
function parseJsonOrNull(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null; // Its callers ask what is there, not what is wrong with it.
  }
}

/**
 * Cuts what an agent printed to one line of a screen: no escape sequences, no characters that move the
 * cursor or the text, and room for two columns for whatever is not ASCII.
 *
 * @example
 * ```ts
 * import { fitLine } from "./loop-runner.ts";
 * if (fitLine("\u001b[31mred\u001b[0m\r漢字", 5) !== "red漢") throw new Error("wrong line");
 * ```
 */
export function fitLine(text: string, columns: number): string {
  // deno-lint-ignore no-control-regex -- escape sequences of terminals start with ESC.
  const plain = text.replace(/\u001b\[[0-?]*[ -/]*[@-~]/g, "").replace(/\t/g, " ")
    .replace(/\p{C}/gu, "");
  let width = 0;
  let line = "";
  for (const character of plain) {
    width += character < "\u0080" ? 1 : 2;
    if (width > columns) break;
    line += character;
  }
  return line;
}

function errorMessage(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

function formatSeconds(milliseconds: number): string {
  const seconds = Math.round(milliseconds / 1000);
  return seconds < 60 ? `${seconds} s` : `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

// --- Verdict ---

/** What was made of a verifier's output. */
export interface ParsedVerdict {
  /** Null when there is none, or none that can be relied on. */
  readonly verdict: Verdict | null;
  /** Why there is none; empty when there is one. */
  readonly problem: string;
  readonly warnings: readonly string[];
}

interface VerdictCandidate {
  readonly fields: Readonly<Record<string, unknown>>;
  readonly isFenced: boolean;
}

/** What a reader returns where the text does not go on as JSON does. */
const BROKEN = Symbol("broken");

/** Bare words of JSON, and those of other languages that models write in it. */
const WORDS: ReadonlyMap<string, unknown> = new Map<string, unknown>([
  ["true", true],
  ["false", false],
  ["null", null],
  ["NaN", NaN],
  ["Infinity", Infinity],
  ["-Infinity", -Infinity],
]);

/**
 * Reads JSON objects that stand somewhere in a text, with trailing commas and WORDS. Where an object
 * breaks off, the next one is looked for from there, so that the whole takes linear time.
 */
class ObjectReader {
  /** Objects with a `pass`, the outermost of those within each other; also those in a broken object. */
  readonly found: Record<string, unknown>[] = [];
  #at = 0;

  constructor(readonly text: string) {}

  /**
   * Reads the object at a `{`.
   *
   * @returns Where it ended or broke off, and whether the text ended within it.
   */
  read(start: number): { end: number; isCutOff: boolean } {
    this.#at = start;
    const isBroken = this.#readValue(0) === BROKEN;
    return { end: this.#at, isCutOff: isBroken && this.#at >= this.text.length };
  }

  /** Moves on by what an expression matches here, if only the empty text. */
  #take(sticky: RegExp): string {
    sticky.lastIndex = this.#at;
    const found = sticky.exec(this.text)![0];
    this.#at += found.length;
    return found;
  }

  #skipSpace(): string | undefined {
    this.#take(/[ \t\n\r]*/y);
    return this.text[this.#at];
  }

  #readValue(depth: number): unknown {
    const first = this.#skipSpace();
    if (depth > MAX_DEPTH) return BROKEN;
    if (first === "{") return this.#readObject(depth + 1);
    if (first === "[") return this.#readList(depth + 1);
    return first === '"' ? this.#readString() : this.#readWord();
  }

  #readObject(depth: number): unknown {
    const foundBefore = this.found.length;
    const fields: Record<string, unknown> = Object.create(null);
    const isWhole = this.#readItems("}", () => {
      if (this.text[this.#at] !== '"') return false;
      const key = this.#readString();
      if (key === BROKEN || this.#skipSpace() !== ":") return false;
      this.#at++;
      const value = this.#readValue(depth);
      fields[key as string] = value;
      return value !== BROKEN;
    });
    if (!isWhole) return BROKEN;
    if (Object.hasOwn(fields, "pass")) {
      this.found.length = foundBefore;
      this.found.push(fields);
    }
    return fields;
  }

  #readList(depth: number): unknown {
    const items: unknown[] = [];
    const isWhole = this.#readItems("]", () => {
      const item = this.#readValue(depth);
      items.push(item);
      return item !== BROKEN;
    });
    return isWhole ? items : BROKEN;
  }

  /** Reads what stands between brackets, a comma after each but perhaps the last. */
  #readItems(close: string, readItem: () => boolean): boolean {
    do {
      this.#at++;
      if (this.#skipSpace() === close) break;
      if (!readItem()) return false;
    } while (this.#skipSpace() === ",");
    if (this.text[this.#at] !== close) return false;
    this.#at++;
    return true;
  }

  /** Reads a string; BROKEN where it does not end in its line. */
  #readString(): unknown {
    const from = this.#at++;
    for (; this.#at < this.text.length; this.#at++) {
      const code = this.text.charCodeAt(this.#at);
      if (code < 0x20) return BROKEN;
      if (code === 0x5c) this.#at++;
      if (code !== 0x22) continue;
      this.#at++;
      const quoted = this.text.slice(from, this.#at);
      return parseJsonOrNull(doubleBackslashes(quoted)) ?? BROKEN;
    }
    return BROKEN;
  }

  #readWord(): unknown {
    const word = this.#take(/[-+.\w]*/y);
    if (/^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/.test(word)) return Number(word);
    return WORDS.has(word) ? WORDS.get(word) : BROKEN;
  }
}

/** Doubles the backslashes that begin no escape of JSON: models quote paths and expressions as they are. */
function doubleBackslashes(quoted: string): string {
  return quoted.replace(
    /\\(["\\/bfnrt]|u[\da-fA-F]{4})|\\/g,
    (match, known) => known === undefined ? "\\\\" : match,
  );
}

/**
 * Finds every object with a `pass` in a text. An object that breaks off at the end of the text while
 * it speaks of a `pass` makes the whole unreliable: a verdict that was cut short may have been a no.
 */
function listCandidates(text: string): { candidates: VerdictCandidate[]; isCutOff: boolean } {
  const reader = new ObjectReader(text);
  const candidates: VerdictCandidate[] = [];
  const findFence = (from: number) => {
    const found = text.indexOf("```", from);
    return found < 0 ? Infinity : found;
  };
  let isFenced = false;
  let fence = findFence(0);
  for (let at = text.indexOf("{"); at >= 0;) {
    for (; fence < at; fence = findFence(fence + 3)) isFenced = !isFenced;
    const { end, isCutOff } = reader.read(at);
    if (isCutOff) return { candidates, isCutOff: text.includes('"pass"', at) };
    for (const fields of reader.found.splice(0)) candidates.push({ fields, isFenced });
    // A fence in an object's strings opens nothing.
    if (fence < end) fence = findFence(end);
    at = text.indexOf("{", end);
  }
  return { candidates, isCutOff: false };
}

/** The boolean in a `pass` field, or null when it says neither. */
function readPass(value: unknown): boolean | null {
  if (typeof value === "boolean") return value;
  if (typeof value === "number") return !Number.isNaN(value) && value !== 0;
  if (typeof value !== "string") return null;
  return !["", "false", "no", "n", "fail", "failed", "0", "none", "null", "off"]
    .includes(value.trim().toLowerCase());
}

function readScore(value: unknown, warnings: string[]): number {
  if (typeof value !== "number" || !Number.isFinite(value)) return 0.5;
  if (value >= 0 && value <= 1) return value;
  warnings.push(`the verdict's score ${value} was outside 0 to 1`);
  return Math.min(1, Math.max(0, value));
}

function readReasons(value: unknown): string[] {
  const items = Array.isArray(value) ? value : value === undefined || value === null ? [] : [value];
  return items.slice(0, MAX_REASONS).map((item) =>
    truncateText(typeof item === "string" ? item : describeValue(item), MAX_REASON_CHARS)
  );
}

/** Takes out what cannot stand in valid JSON, in or out of its strings, but models and terminals add. */
function stripNoise(output: string): string {
  return output
    // deno-lint-ignore no-control-regex -- escape sequences of terminals start with ESC.
    .replace(/\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|[@-Z\\^_])/g, "")
    .replace(/^\uFEFF/, "")
    .replace(/(?:^|\n)[ \t]*(?:\/\/|#)[^\n]*/g, "");
}

/**
 * Reads a verifier's output. Never throws; takes time linear in the text.
 *
 * A candidate is any JSON object with a `pass`. Those that carry the nonce win and the last of them
 * counts. Where none does, all count: two that disagree are no verdict, else a fenced one goes first.
 *
 * @param nonce What this tick's prompt asked to be given back.
 * @param material What others wrote into the prompt: its verdicts count for nothing when they are quoted.
 *
 * @example
 * ```ts
 * import { parseVerdict } from "./loop-runner.ts";
 * const { verdict } = parseVerdict('Looks good.\n{"pass": true, "score": 0.9, "nonce": "n1"}', "n1");
 * if (verdict?.pass !== true || verdict.score !== 0.9) throw new Error("not understood");
 * ```
 */
export function parseVerdict(output: string, nonce: string, material = ""): ParsedVerdict {
  const text = stripNoise(output);
  const none = (problem: string): ParsedVerdict => ({ verdict: null, problem, warnings: [] });
  const { candidates, isCutOff } = listCandidates(text);
  if (isCutOff) return none("the verifier's last JSON object breaks off");
  if (candidates.length === 0) return none('the verifier printed no JSON object with a "pass"');
  const signed = candidates.filter(({ fields }) => fields.nonce === nonce);
  const warnings: string[] = [];
  let chosen = signed.at(-1);
  if (chosen === undefined) {
    warnings.push("the verdict does not carry the tick's nonce");
    const asText = ({ fields }: VerdictCandidate) => JSON.stringify(fields);
    const quoted = new Set(listCandidates(stripNoise(material)).candidates.map(asText));
    const own = candidates.filter((candidate) => !quoted.has(asText(candidate)));
    if (own.length === 0) {
      return none("the verifier printed only verdicts of the prompt, none of its own");
    }
    const passes = new Set(own.map(({ fields }) => readPass(fields.pass)));
    if (passes.size > 1) return none("the verifier printed verdicts that disagree");
    chosen = own.findLast(({ isFenced }) => isFenced) ?? own.at(-1)!;
  }
  const pass = readPass(chosen.fields.pass);
  if (pass === null) return none(`the verdict's pass is ${describeValue(chosen.fields.pass)}`);
  const hint = chosen.fields.next_hint;
  const verdict: Verdict = {
    pass,
    score: readScore(chosen.fields.score, warnings),
    reasons: readReasons(chosen.fields.reasons),
    ...(typeof hint === "string" ? { next_hint: truncateText(hint, MAX_HINT_CHARS) } : {}),
  };
  return { verdict, problem: "", warnings };
}

// --- Prompts ---

/** Values of prompt tokens that may be shortened so that a prompt fits: those of a group alike. */
const SHRINKABLE = [
  ["{artifact_content}", "{diff}"],
  ["{task_brief}", "{acceptance_criteria}", "{next_hint}"],
] as const;

/** The length to which all may have that have more, so that together they take no more than `room`. */
function findCommonLength(lengths: readonly number[], room: number): number {
  const sorted = lengths.toSorted((a, b) => a - b);
  let left = room;
  for (const [index, length] of sorted.entries()) {
    const share = Math.floor(left / (sorted.length - index));
    if (length > share) return Math.max(0, share);
    left -= length;
  }
  return Infinity;
}

/**
 * Fills a prompt's tokens and fits the whole to a budget: first the artifact and the diff are shortened,
 * the longer one first, then what describes the task.
 *
 * @param maxTokens The role's budget, in tokens of 4 characters.
 * @returns The prompt; longer than the budget only where its fixed text alone is.
 */
export function fillPrompt(
  template: string,
  values: Readonly<Record<string, string>>,
  maxTokens: number,
): string {
  const fitted = { ...values };
  const maxChars = maxTokens * CHARS_PER_TOKEN;
  for (const group of SHRINKABLE) {
    const excess = substituteTokens(template, fitted).length - maxChars;
    if (excess <= 0) break;
    const lengths = group.flatMap((token) =>
      Array(template.split(token).length - 1).fill((fitted[token] ?? "").length)
    );
    const room = lengths.reduce((sum, length) => sum + length, 0) - excess;
    const common = findCommonLength(lengths, room);
    for (const token of group) {
      const value = fitted[token] ?? "";
      if (value.length <= common) continue;
      fitted[token] = truncateText(value, Math.max(0, common - TRUNCATION_MARK.length));
    }
  }
  return substituteTokens(template, fitted);
}

/** False for a text that is too long to name a file, or has more than one line. */
function isFileName(text: string): boolean {
  return !/[\n\0]/.test(text) && new TextEncoder().encode(text).length < 256;
}

/** A role's prompt as written: the loop's own file, else the framework's, else the reference itself. */
function readPromptTemplate(tick: Tick, role: RoleName): string {
  const reference = tick.config.roles?.[role]?.prompt ?? DEFAULT_PROMPTS[role];
  if (!isFileName(reference)) return reference;
  for (const folder of [tick.dir, join(tick.framework, "prompts")]) {
    const path = join(folder, reference);
    const text = isDirectory(path) ? null : readTextIfPresent(path);
    if (text !== null) return text;
  }
  if (/^\S+\.(md|txt)$/.test(reference)) {
    warn(
      tick,
      `prompt "${reference}" is in neither ${tick.dir} nor ${tick.framework}/prompts: its name is the prompt`,
    );
  }
  return reference;
}

/** What a task is about: its first document, else its title. */
function readTaskBrief(task: TaskView): string {
  for (const document of ["RESEARCH.md", "DESIGN.md", "SPEC.md"]) {
    const text = readTextIfPresent(join(task.dir, document));
    if (text !== null && text.trim() !== "") return text;
  }
  return task.title;
}

function outputPath(tick: OpenLoop, suffix: string): string {
  return join(tick.dir, "outputs", `tick${tick.number}-${suffix}`);
}

/** Opens a file that is made anew: what an agent put in its place, a link say, is not followed. */
function openFresh(path: string): Deno.FsFile {
  ensureDirSync(dirname(path));
  if (isAnythingAt(path)) Deno.removeSync(path, { recursive: true });
  return Deno.openSync(path, { write: true, createNew: true });
}

function writeFresh(path: string, text: string): void {
  using file = openFresh(path);
  const bytes = new TextEncoder().encode(text);
  for (let done = 0; done < bytes.length;) done += file.writeSync(bytes.subarray(done));
}

/** Values that prompts and argv have in common. */
function commonValues(tick: Tick): Record<string, string> {
  const criteria = tick.config.acceptance_criteria ?? "";
  const hint: unknown = tick.state.last_verdict?.next_hint;
  return {
    "{loop_name}": tick.loop,
    "{task_brief}": truncateTokens(readTaskBrief(tick.task), BRIEF_TOKENS),
    "{acceptance_criteria}": truncateTokens(
      typeof criteria === "string" ? criteria : criteria.join("\n"),
      CRITERIA_TOKENS,
    ),
    "{next_hint}": truncateTokens(typeof hint === "string" ? hint : "", HINT_TOKENS),
    "{current_task}": tick.task.name,
    "{current_phase}": tick.task.phase,
    "{task_dir}": tick.task.dir,
  };
}

/** Replaces tokens in the value of a variable; where that is JSON, by what stands for them within its strings. */
function substituteEnv(text: string, values: Readonly<Record<string, string>>): string {
  if (parseJsonOrNull(text) === null) return substituteTokens(text, values);
  const escaped = Object.entries(values)
    .map(([token, value]) => [token, JSON.stringify(value).slice(1, -1)]);
  return substituteTokens(text, Object.fromEntries(escaped));
}

/** Resolves a role's prompt and writes it where the harness finds it. */
function writePrompt(tick: Tick, role: RoleName, values: Readonly<Record<string, string>>): string {
  const config = tick.config.roles?.[role];
  const template = readPromptTemplate(tick, role);
  const budget = Math.min(config?.tier ?? DEFAULT_TIER_TOKENS, tick.windowTokens);
  const prompt = fillPrompt(template, {
    ...commonValues(tick),
    "{phase_document}": tick.task.document ?? "",
    "{status_command}": quoteForSh(programArgv(tick.framework, "status")),
    ...values,
  }, budget).replaceAll("\0", "\uFFFD"); // No argument can hold a NUL.
  if (prompt.length > budget * CHARS_PER_TOKEN) {
    warn(tick, `the ${role} prompt is longer than its ${budget} tokens`);
  }
  const path = outputPath(tick, `${role}-prompt.md`);
  writeFresh(path, prompt);
  return path;
}

/** Notes a warning for the summary and the log. */
function warn(tick: OpenLoop, text: string): void {
  const message = toOneLine(text);
  tick.summary.warnings.push(message);
  logOnce(tick, "WARNING", "WARNING", { message });
}

/** Events that idle ticks log again and again. */
const IDLE_EVENTS = ["WARNING", "TICK_SKIPPED"];

/** Logs one of IDLE_EVENTS, unless the log says so already and nothing else has happened since. */
function logOnce(
  wake: Wake,
  level: "INFO" | "WARNING",
  event: string,
  fields: Readonly<Record<string, unknown>>,
): void {
  for (const line of readLogTail(wake.dir).reverse()) {
    if (!IDLE_EVENTS.includes(`${line.event}`)) break;
    const isSame = Object.entries(fields).every(([key, value]) => line[key] === value);
    if (line.event === event && isSame) return;
  }
  logSafely(wake, level, event, { tick: wake.summary.tick, ...fields });
}

/** The last lines of a loop's log; none where it cannot be read. */
function readLogTail(dir: string): Record<string, unknown>[] {
  try {
    const path = join(dir, ".state.log");
    const { isFile, size } = Deno.statSync(path);
    if (!isFile) return [];
    using file = Deno.openSync(path, { read: true });
    file.seekSync(Math.max(0, size - LOG_TAIL_BYTES), Deno.SeekMode.Start);
    const bytes = new Uint8Array(LOG_TAIL_BYTES);
    const text = new TextDecoder().decode(bytes.subarray(0, file.readSync(bytes) ?? 0));
    return text.split("\n").map(parseJsonOrNull).filter(isRecord);
  } catch {
    return []; // No log yet: whatever is to be said is said.
  }
}

/** Appends to the log; one that cannot be written is a warning, never the end of a tick. */
function logSafely(
  { dir, summary, isDryRun }: Pick<Wake, "dir" | "summary" | "isDryRun">,
  level: "INFO" | "WARNING" | "ERROR",
  event: string,
  fields: Record<string, unknown>,
): void {
  if (isDryRun) return;
  try {
    appendLog(dir, level, event, fields);
  } catch (error) {
    summary.warnings.push(`Cannot write the log in "${dir}": ${errorMessage(error)}`);
  }
}

// --- Processes ---

/** The words with which a sibling program is run: compiled beside this one, or its source. */
function programArgv(framework: string, program: "status" | "vram-detect"): string[] {
  if (Deno.build.standalone) {
    const extension = Deno.build.os === "windows" ? ".exe" : "";
    return [join(dirname(EXECUTABLE), program + extension)];
  }
  const script = join(framework, "scripts", `${program}.ts`);
  return [EXECUTABLE, "run", "-q", "--no-prompt", `-P=${program}`, script];
}

/** What a sibling program answered: the object of its last line, or why there is none. */
interface ProgramAnswer {
  readonly json: Record<string, unknown> | null;
  readonly code: number | null;
  readonly problem: string;
  /** What it warned of on stderr. */
  readonly warnings: readonly string[];
}

/** Runs a sibling program with `--json`. */
async function runProgram(
  tick: Pick<Wake, "framework" | "project" | "loop">,
  program: "status" | "vram-detect",
  args: readonly string[],
  holdsLock = false,
): Promise<ProgramAnswer> {
  const env: Record<string, string> = {
    AUTOMATON_HOME: tick.framework,
    AUTOMATON_PROJECT: tick.project,
    AUTOMATON_LOOP: tick.loop,
  };
  if (holdsLock) env.AUTOMATON_NO_LOOP_LOCK = "1";
  const argv = [...programArgv(tick.framework, program), ...args, "--json"];
  const { code, stdout, stderr } = await runCommand(argv, { env, timeoutMs: 120_000 });
  const lastLine = new TextDecoder().decode(stdout).trimEnd().split("\n").at(-1) ?? "";
  const json = parseJsonOrNull(lastLine);
  const lines = stderr.split("\n");
  const told = isRecord(json) && typeof json.error === "string" ? json.error : lines[0];
  return {
    json: isRecord(json) ? json : null,
    code,
    problem: told || `exit code ${code}`,
    warnings: lines.filter((line) => line.startsWith("warning: ")).map((line) => line.slice(9)),
  };
}

/** Runs a tool of the system. */
function runTool(argv: readonly string[]): Promise<CommandOutcome> {
  const env = { PATH: `${readEnv("PATH") ?? ""}:${TOOLS_PATH}` };
  return runCommand(argv, { env, timeoutMs: 10_000 });
}

/** The processes of this machine; empty where they cannot be listed. */
async function listProcesses(): Promise<ProcessEntry[]> {
  if (Deno.build.os === "windows") return [];
  const isLinux = Deno.build.os === "linux";
  // Deno itself may not read /proc without --allow-all; a fixed script may.
  const argv = isLinux
    ? ["sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null"]
    : ["ps", "-A", "-o", "pid=,stat=,ppid=,pgid=,lstart="];
  const { stdout } = await runTool(argv);
  const parse = isLinux ? parseProcStat : parsePsLine;
  return new TextDecoder().decode(stdout).split("\n").map(parse).filter((entry) => entry !== null);
}

/** One line of /proc/PID/stat (proc(5)): pid, (name), state, parent, group, …, 22nd the start time. */
export function parseProcStat(line: string): ProcessEntry | null {
  const match = /^(\d+) \(.*\) (\S) (\d+) (\d+) (.*)$/.exec(line);
  if (match === null) return null;
  const [, pid, state, parent, group, rest] = match;
  return {
    pid: Number(pid),
    parent: Number(parent),
    group: Number(group),
    isZombie: state === "Z" || state === "X",
    started: rest!.split(" ")[16] ?? "",
  };
}

/** One line of `ps -o pid=,stat=,ppid=,pgid=,lstart=` (macOS, BSD). */
export function parsePsLine(line: string): ProcessEntry | null {
  const match = /^\s*(\d+)\s+(\S+)\s+(\d+)\s+(\d+)\s+(.*)$/.exec(line);
  if (match === null) return null;
  const [, pid, state, parent, group, started] = match;
  return {
    pid: Number(pid),
    parent: Number(parent),
    group: Number(group),
    isZombie: state!.startsWith("Z"),
    started: started!.trim(),
  };
}

/**
 * Sets a limit of this process that its children inherit and that nothing heeds: Linux has ignored that
 * of file locks since 2.4.25 (getrlimit(2)). As the mark of a run it stays on a process that leaves its
 * group and its parent and clears its environment. Without util-linux the marker there has to do.
 */
async function setInheritedLimit(value: string): Promise<void> {
  if (Deno.build.os !== "linux") return;
  await runTool(["prlimit", `--pid=${Deno.pid}`, `--locks=${value}:`]);
}

/** The ids of processes that carry a run's marker in their environment or in their limits. */
async function listMarked(runId: string): Promise<Set<number>> {
  const marker = `AUTOMATON_RUN_ID=${runId}`;
  if (Deno.build.os === "linux") {
    const script = 'grep -slF -e "$1" /proc/[0-9]*/environ; ' +
      'grep -sl "^Max file locks  *$2 " /proc/[0-9]*/limits';
    const { stdout } = await runTool(["sh", "-c", script, "sh", marker, markLimit(runId)]);
    return new Set(
      [...new TextDecoder().decode(stdout).matchAll(/\/proc\/(\d+)\//g)].map((m) => Number(m[1])),
    );
  }
  if (Deno.build.os === "windows") return new Set();
  const { stdout } = await runTool(["ps", "-A", "-E", "-ww", "-o", "pid=,command="]);
  const lines = new TextDecoder().decode(stdout).split("\n").filter((line) =>
    line.includes(marker)
  );
  return new Set(
    lines.map((line) => parseInt(line, 10)).filter((pid) => pid > 0 && pid !== Deno.pid),
  );
}

/** A process that leads a group of its own, and when it started. */
interface Leader {
  readonly pid: number;
  readonly started: string | null;
}

/**
 * All living processes of a run: of the harness's group, descended from it, or marked.
 *
 * @param leader Null where only the marker is left to go by.
 */
async function findRunProcesses(leader: Leader | null, runId: string): Promise<ProcessEntry[]> {
  const [table, marked] = await Promise.all([listProcesses(), listMarked(runId)]);
  const family = new Set(marked);
  // A group id stays taken while a process is in the group, so a group with a strange leader is new.
  const isGroupOurs = leader !== null &&
    table.every(({ pid, started }) =>
      pid !== leader.pid || leader.started === null || started === leader.started
    );
  if (isGroupOurs) {
    for (const { pid, group } of table) {
      if (group === leader.pid || pid === leader.pid) family.add(pid);
    }
  }
  for (let size = -1; size !== family.size;) {
    size = family.size;
    for (const entry of table) if (family.has(entry.parent)) family.add(entry.pid);
  }
  family.delete(Deno.pid);
  return table.filter((entry) => family.has(entry.pid) && !entry.isZombie);
}

function sendSignal(pid: number, signal: Deno.Signal): void {
  try {
    Deno.kill(pid, signal);
  } catch {
    // It has ended since it was listed, which is all that was wanted.
  }
}

/**
 * Ends every process of a run: TERM, a grace, KILL.
 *
 * @returns How many there were, and how many could not be ended.
 */
async function endRun(
  leader: Leader | null,
  runId: string,
): Promise<{ found: number; survivors: number }> {
  if (Deno.build.os === "windows") {
    if (leader === null) return { found: 0, survivors: 0 };
    const argv = ["taskkill", "/T", "/F", "/PID", `${leader.pid}`];
    const { code } = await runCommand(argv, { timeoutMs: 15_000 });
    return { found: code === 0 ? 1 : 0, survivors: 0 };
  }
  let living = await findRunProcesses(leader, runId);
  const found = living.length;
  const steps = [["SIGTERM", TERM_GRACE_MS], ["SIGKILL", KILL_GRACE_MS]] as const;
  for (const [signal, graceMs] of steps) {
    const deadline = performance.now() + graceMs;
    const told = new Set<number>();
    while (living.length > 0) {
      // Ones that started since the last look are told too.
      for (const { pid } of living) {
        if (!told.has(pid)) sendSignal(pid, signal);
        told.add(pid);
      }
      if (performance.now() >= deadline) break;
      await sleep(100);
      living = await findRunProcesses(leader, runId);
    }
  }
  return { found, survivors: living.length };
}

// --- Harness ---

interface HarnessRequest {
  /** Names the output files and the progress line: a role, a check, the commit. */
  readonly label: string;
  readonly argv: readonly string[];
  readonly env: Readonly<Record<string, string>>;
  /** Text for stdin; null closes it. */
  readonly stdin: string | null;
  readonly timeoutMs: number;
  readonly idleTimeoutMs: number;
  readonly usage?: UsageConfig | undefined;
}

/** The values at a dotted path of a JSON value; `*` stands for every item of a list or an object. */
function listDottedPath(value: unknown, keys: readonly string[]): unknown[] {
  let inner = value;
  for (const [index, key] of keys.entries()) {
    if (typeof inner !== "object" || inner === null) return [];
    if (key === "*") {
      const below = keys.slice(index + 1);
      return Object.values(inner).flatMap((item) => listDottedPath(item, below));
    }
    if (!Object.hasOwn(inner, key)) return [];
    inner = (inner as Record<string, unknown>)[key];
  }
  return [inner];
}

/** Reads cost, tokens, text and error out of a harness's JSON lines as they come. */
export class UsageReader {
  #partial = "";
  #isTooLong = false;
  #hasRecord = false;
  #decoder = new TextDecoder();
  #texts: string[] = [];
  #textChars = 0;
  readonly #report: UsageReport = {
    costUsd: null,
    inputTokens: null,
    outputTokens: null,
    text: null,
    error: null,
  };

  /** The paths of the configuration, taken apart once: there may be millions of lines. */
  readonly #paths: Readonly<
    Record<"cost" | "input" | "output" | "text" | "error", string[] | null>
  >;
  readonly #where: readonly (readonly [path: string[], text: string])[];
  /** A line without any of these words holds nothing that is looked for, and need not be parsed. */
  readonly #marks: readonly string[];

  constructor(readonly config: UsageConfig) {
    const split = (path: string | undefined) => path?.split(".") ?? null;
    this.#paths = {
      cost: split(config.cost_usd),
      input: split(config.input_tokens),
      output: split(config.output_tokens),
      text: split(config.text),
      error: split(config.error),
    };
    this.#where = Object.entries(config.where ?? {}).map(([path, text]) => [path.split("."), text]);
    const keys = Object.values(this.#paths).map((path) => path?.findLast((key) => key !== "*"));
    this.#marks = keys.filter((key) => key !== undefined).map((key) => JSON.stringify(key));
  }

  /** Takes the next bytes of stdout; a line longer than TAIL_BYTES is passed over. */
  push(bytes: Uint8Array): void {
    const lines = (this.#partial + this.#decoder.decode(bytes, { stream: true })).split("\n");
    const rest = lines.pop()!;
    for (const line of lines) {
      if (!this.#isTooLong) this.#readLine(line);
      this.#isTooLong = false;
    }
    this.#isTooLong ||= rest.length > TAIL_BYTES;
    this.#partial = this.#isTooLong ? "" : rest;
  }

  /** What was found, once all has come. */
  finish(): UsageReport {
    this.#readLine(this.#partial);
    this.#partial = "";
    const isAsked = this.config.text !== undefined && this.#hasRecord;
    return { ...this.#report, text: isAsked ? this.#texts.join("\n") : null };
  }

  #readLine(line: string): void {
    if (!line.trimStart().startsWith("{")) return;
    if (!this.#marks.some((mark) => line.includes(mark))) return;
    const record = parseJsonOrNull(line); // Null for a line for people between the records.
    if (record === null) return;
    if (!this.#where.every(([path, text]) => listDottedPath(record, path).includes(text))) return;
    const isSum = this.config.combine === "sum";
    const valuesAt = (name: "cost" | "input" | "output" | "text" | "error") => {
      const path = this.#paths[name];
      const values = path === null ? [] : listDottedPath(record, path);
      this.#hasRecord ||= values.length > 0;
      return values;
    };
    const add = (key: "costUsd" | "inputTokens" | "outputTokens", values: unknown[]) => {
      const numbers = values.filter(isNumberFrom(0)) as number[];
      if (numbers.length === 0) return;
      const known = isSum ? this.#report[key] ?? 0 : 0;
      this.#report[key] = numbers.reduce((sum, number) => sum + number, known);
    };
    add("costUsd", valuesAt("cost"));
    add("inputTokens", valuesAt("input"));
    add("outputTokens", valuesAt("output"));
    const texts = valuesAt("text").filter((value) => typeof value === "string");
    if (texts.length > 0) this.#keepTexts(texts, isSum);
    this.#report.error = valuesAt("error").find((value) => typeof value === "string") ?? null;
  }

  /** Keeps as much of the answer's end as a verdict is looked for in. */
  #keepTexts(texts: readonly string[], isMore: boolean): void {
    if (!isMore) [this.#texts, this.#textChars] = [[], 0];
    for (const text of texts) {
      this.#texts.push(text);
      this.#textChars += text.length;
    }
    if (this.#textChars < 2 * TAIL_BYTES) return;
    // Seldom and many at once: taking them one by one off a long list costs time in its square.
    let dropped = 0;
    while (this.#textChars - this.#texts[dropped]!.length >= TAIL_BYTES) {
      this.#textChars -= this.#texts[dropped++]!.length;
    }
    this.#texts.splice(0, dropped);
  }
}

/** Copies a stream into a file, with a bound, and keeps its end. */
class StreamRecorder {
  /** The last TAIL_BYTES bytes: byte number n of the stream lies at n modulo that. */
  #ring = new Uint8Array(TAIL_BYTES);
  #seen = 0;
  #written = 0;
  #dropped = 0;
  #reader: ReadableStreamBYOBReader;
  readonly done: Promise<void>;
  lastOutputAt = performance.now();

  /**
   * @param file Is closed at the end.
   * @param onBytes Sees every part as it comes.
   */
  constructor(
    stream: ReadableStream<Uint8Array>,
    readonly file: Deno.FsFile,
    readonly onBytes: ((bytes: Uint8Array) => void) | null = null,
  ) {
    this.#reader = stream.getReader({ mode: "byob" });
    this.done = this.#copy();
  }

  async #copy(): Promise<void> {
    // One buffer for all reads: a new one for each costs 20 MB until they are collected.
    let buffer = new Uint8Array(READ_BYTES);
    try {
      while (true) {
        const { value, done } = await this.#reader.read(buffer);
        if (done) break;
        this.#keep(value);
        buffer = new Uint8Array(value.buffer);
      }
    } catch {
      // A pipe that breaks ends like one that is closed: what came before counts.
    } finally {
      this.#finish();
    }
  }

  #keep(bytes: Uint8Array): void {
    this.lastOutputAt = performance.now();
    this.onBytes?.(bytes);
    const kept = bytes.subarray(0, Math.max(0, MAX_STREAM_BYTES - this.#written));
    this.#written += writeAll(this.file, kept);
    this.#dropped += bytes.length - kept.length;
    const end = bytes.subarray(-TAIL_BYTES);
    const at = (this.#seen + bytes.length - end.length) % TAIL_BYTES;
    const room = TAIL_BYTES - at;
    this.#ring.set(end.subarray(0, room), at);
    this.#ring.set(end.subarray(room), 0);
    this.#seen += bytes.length;
  }

  #finish(): void {
    if (this.#dropped > 0) {
      const mark = `\n…[${this.#dropped} bytes more, of which these are the last]\n${
        this.tail(4096)
      }`;
      writeAll(this.file, new TextEncoder().encode(mark));
    }
    this.file.close();
  }

  /** The end of what has come so far, at most TAIL_BYTES. */
  tail(maxBytes = TAIL_BYTES): string {
    const bytes = new Uint8Array(Math.min(this.#seen, maxBytes));
    const from = (this.#seen - bytes.length) % TAIL_BYTES;
    const first = this.#ring.subarray(from, from + bytes.length);
    bytes.set(first);
    bytes.set(this.#ring.subarray(0, bytes.length - first.length), first.length);
    return new TextDecoder().decode(bytes);
  }

  /** The last line that is not blank, for people who watch. */
  lastLine(): string {
    return this.tail(2000).trimEnd().split("\n").at(-1)!.trim();
  }

  /** Stops waiting for a pipe that somebody still holds open. */
  async abandon(): Promise<void> {
    await this.#reader.cancel().catch(() => {}); // Cancelled or broken, it is not read any more.
    await this.done;
  }
}

/** Writes all bytes; on a full disk the rest is given up, since the harness must go on. */
function writeAll(file: Deno.FsFile, bytes: Uint8Array): number {
  let done = 0;
  try {
    while (done < bytes.length) done += file.writeSync(bytes.subarray(done));
  } catch {
    // The log is a record for people; the verdict is read from memory.
  }
  return done;
}

/** Says why a harness could not be started. */
function describeStartFailure(
  error: unknown,
  { argv, env }: HarnessRequest,
): Pick<HarnessOutcome, "result" | "message"> {
  const command = argv[0]!;
  const isTooLong = (error as { code?: string }).code === "E2BIG" ||
    errorMessage(error).includes("(os error 206)"); // Windows: the command line is too long.
  if (error instanceof Deno.errors.NotFound) {
    return {
      result: "not_found",
      message: `Cannot start "${command}": not found, or its interpreter is missing (PATH is ${
        env.PATH || "empty"
      })`,
    };
  }
  if (error instanceof Deno.errors.PermissionDenied) {
    return { result: "not_executable", message: `Cannot start "${command}": it is not executable` };
  }
  if (isTooLong) {
    const longest = Math.max(...argv.map((argument) => argument.length));
    return {
      result: "argument_list_too_long",
      message:
        `Cannot start "${command}": its arguments are too long (the longest has ${longest} characters); give the prompt by {prompt} or on stdin`,
    };
  }
  return { result: "cannot_start", message: `Cannot start "${command}": ${errorMessage(error)}` };
}

/** Feeds a prompt to a harness that may not want to read it. */
async function feedStdin(stdin: WritableStream<Uint8Array>, text: string): Promise<void> {
  try {
    const writer = stdin.getWriter();
    await writer.write(new TextEncoder().encode(text));
    await writer.close();
  } catch {
    // The harness closed its stdin or ended; its outcome says the rest.
  }
}

/** Runs a harness to its end or its deadline; no process of it is left when this returns. */
async function runHarness(tick: Workplace, request: HarnessRequest): Promise<HarnessOutcome> {
  const { label, argv } = request;
  const paths = [outputPath(tick, `${label}.log`), outputPath(tick, `${label}.err.log`)] as const;
  const { artifacts } = tick.summary;
  [artifacts[`${label}_log`], artifacts[`${label}_err_log`]] = paths;
  const files = [openFresh(paths[0]), openFresh(paths[1])] as const;
  const fail = (reason: Pick<HarnessOutcome, "result" | "message">): HarnessOutcome => {
    for (const file of files) file.close();
    const nothing = { exitCode: null, stdoutTail: "", stderrTail: "", usage: null, leftOver: 0 };
    return { ...reason, ...nothing };
  };
  if (!isDirectory(tick.cwd)) {
    const message = `Cannot start "${argv[0]}": no folder "${tick.cwd}"`;
    return fail({ result: "cannot_start", message });
  }
  let child: Deno.ChildProcess;
  // Before it starts: status asks the note who calls.
  noteHarness(tick, null, request.env);
  await setInheritedLimit(markLimit(tick.runId));
  try {
    child = new Deno.Command(argv[0]!, {
      args: argv.slice(1),
      cwd: tick.cwd,
      clearEnv: true,
      env: request.env,
      stdin: request.stdin === null ? "null" : "piped",
      stdout: "piped",
      stderr: "piped",
      detached: true,
    }).spawn();
  } catch (error) {
    return fail(describeStartFailure(error, request));
  } finally {
    await setInheritedLimit("unlimited");
  }
  const usage = request.usage === undefined ? null : new UsageReader(request.usage);
  const streams = [
    new StreamRecorder(child.stdout, files[0], usage && ((bytes) => usage.push(bytes))),
    new StreamRecorder(child.stderr, files[1]),
  ] as const;
  if (request.stdin !== null) void feedStdin(child.stdin, request.stdin);
  const { ending, leftOver } = await superviseHarness(tick, request, child, streams);
  const [stdoutTail, stderrTail] = [streams[0].tail(), streams[1].tail()];
  const report = usage?.finish() ?? null;
  const told = ending.result === "ok" ? report?.error ?? null : null;
  const outcome: HarnessEnding = told === null ? ending : {
    result: "reported_error",
    message: `${label} ended with exit code 0 and reported: ${
      truncateText(toOneLine(told), MAX_REASON_CHARS)
    }`,
    exitCode: ending.exitCode,
  };
  return { ...outcome, stdoutTail, stderrTail, usage: report, leftOver };
}

/** Watches a harness and, however that ends, ends what is left of it. */
async function superviseHarness(
  tick: OpenLoop,
  request: HarnessRequest,
  child: Deno.ChildProcess,
  streams: readonly [StreamRecorder, StreamRecorder],
): Promise<{ ending: HarnessEnding; leftOver: number }> {
  let leader: Leader = { pid: child.pid, started: null };
  let ending: HarnessEnding;
  let end = { found: 0, survivors: 0 };
  try {
    leader = { ...leader, started: await findStartTime(child.pid) };
    noteHarness(tick, leader, request.env);
    ending = await watchHarness(tick, request, child, streams);
  } finally {
    end = await endRun(leader, tick.runId);
    await raceWithSleep(Promise.all(streams.map(({ done }) => done)), DRAIN_MS);
    await Promise.all(streams.map((stream) => stream.abandon()));
  }
  noteHarness(tick, null, {});
  if (end.survivors > 0) {
    warn(tick, `${end.survivors} process(es) of ${request.label} could not be ended`);
  }
  return { ending, leftOver: end.found };
}

async function findStartTime(pid: number): Promise<string | null> {
  return (await listProcesses()).find((entry) => entry.pid === pid)?.started ?? null;
}

/** How a harness ended, before its streams are read to their end. */
type HarnessEnding = Pick<HarnessOutcome, "result" | "message" | "exitCode">;

/** Waits for a harness to end by itself, or until a deadline, a pause or a signal says that it has to. */
async function watchHarness(
  tick: OpenLoop,
  request: HarnessRequest,
  child: Deno.ChildProcess,
  streams: readonly [StreamRecorder, StreamRecorder],
): Promise<HarnessEnding> {
  const { label } = request;
  const startedAt = performance.now();
  const progress = startProgress(tick, label);
  let status: Deno.CommandStatus | null = null;
  const ended = child.status.then((value) => {
    status = value;
  });
  let cause: HarnessEnding | null = null;
  while (status === null && cause === null) {
    await raceWithSleep(ended, WATCH_MS);
    cause = status === null ? findEndCause(tick, request, startedAt, streams) : null;
    progress.show(streams[0].lastLine() || streams[1].lastLine());
  }
  progress.end();
  return cause ?? describeEnding(label, status!);
}

function describeEnding(label: string, { code, signal }: Deno.CommandStatus): HarnessEnding {
  if (signal !== null) {
    return { result: "killed", message: `${label} was killed by ${signal}`, exitCode: null };
  }
  if (code === 0) return { result: "ok", message: "", exitCode: 0 };
  const message = `${label} ended with exit code ${code}`;
  return { result: "exit_nonzero", message, exitCode: code };
}

async function raceWithSleep(promise: Promise<unknown>, milliseconds: number): Promise<void> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const slept = new Promise<void>((wake) => {
    timer = setTimeout(wake, milliseconds);
  });
  await Promise.race([promise, slept]);
  clearTimeout(timer);
}

/** Why a running harness has to end now; null while it may go on. */
function findEndCause(
  tick: OpenLoop,
  { label, timeoutMs, idleTimeoutMs }: HarnessRequest,
  startedAt: number,
  streams: readonly StreamRecorder[],
): HarnessEnding | null {
  const now = performance.now();
  const idleMs = now - Math.max(startedAt, ...streams.map(({ lastOutputAt }) => lastOutputAt));
  const end = (result: HarnessResult, message: string) => ({ result, message, exitCode: null });
  if (tick.stop.signal !== null) return end("stopped", `ended by ${tick.stop.signal}`);
  if (isPausedNow(tick.dir)) return end("stopped", "ended by --pause-loop --now");
  if (timeoutMs > 0 && now - startedAt >= timeoutMs) {
    return end("timeout", `${label} ran longer than ${formatSeconds(timeoutMs)}`);
  }
  if (idleTimeoutMs > 0 && idleMs >= idleTimeoutMs) {
    return end("idle_timeout", `${label} printed nothing for ${formatSeconds(idleTimeoutMs)}`);
  }
  return null;
}

const pauseRequestFile = (dir: string) => join(dir, "pause.request");

function isPausedNow(dir: string): boolean {
  try {
    const request: unknown = JSON.parse(readTextIfPresent(pauseRequestFile(dir)) ?? "null");
    return isRecord(request) && request.now === true;
  } catch {
    return false; // Not JSON: a plain request, honoured before the next role.
  }
}

/** Shows on a terminal what a harness is doing; elsewhere one line when it ends. */
function startProgress(
  { loop, number }: OpenLoop,
  label: string,
): { show(line: string): void; end(): void } {
  const startedAt = performance.now();
  const isTerminal = Deno.stderr.isTerminal();
  const write = (text: string) => {
    try {
      Deno.stderr.writeSync(new TextEncoder().encode(text));
    } catch {
      // Nobody reads it, or its disk is full: the work goes on.
    }
  };
  let shownAt = -Infinity;
  const head = () =>
    `${loop} tick ${number}: ${label} ${formatSeconds(performance.now() - startedAt)}`;
  return {
    show(line) {
      if (!isTerminal || performance.now() - shownAt < 1000) return;
      shownAt = performance.now();
      const columns = Deno.consoleSize().columns || 80;
      write(`\r\u001b[K${fitLine(`${head()}  ${line}`, columns - 1)}`);
    },
    end() {
      write(`${isTerminal ? "\r\u001b[K" : ""}${head()}\n`);
    },
  };
}

/**
 * Writes into the lock file who holds it, for people, for `status` and for the next tick.
 *
 * @param runId Null once the tick has ended what it started.
 */
function writeLockNote(
  { lock, loop, startedAt, isDryRun }: Wake,
  runId: string | null,
  harness: Partial<Pick<LockNote, "role" | "task" | "harness_pgid" | "harness_started">> = {},
): void {
  if (lock === null || isDryRun) return;
  const note: LockNote = {
    pid: Deno.pid,
    host: Deno.hostname(),
    loop,
    started_at: startedAt,
    run_id: runId,
    role: null,
    task: null,
    harness_pgid: null,
    harness_started: null,
    ...harness,
  };
  // Always as long, so that it is written over in one go and never read half.
  const bytes = new TextEncoder().encode(`${JSON.stringify(note).padEnd(NOTE_LENGTH)}\n`);
  lock.seekSync(0, Deno.SeekMode.Start);
  writeAll(lock, bytes);
  lock.truncateSync(bytes.length);
}

const lockPath = ({ dir }: Wake) => join(dir, ".state.lock");

/** True while the note is the one of this tick, by which `status` knows its processes. */
const isNoteOurs = (wake: Wake) => readLockNote(lockPath(wake))?.run_id === wake.runId;

/** Notes which harness is at work. A note that somebody has changed stays, for guardControls() to see. */
function noteHarness(
  tick: OpenLoop,
  leader: Leader | null,
  env: Readonly<Record<string, string>>,
): void {
  if (!isNoteOurs(tick)) return;
  writeLockNote(tick, tick.runId, {
    role: env.AUTOMATON_ROLE ?? null,
    task: env.AUTOMATON_TASK ?? null,
    harness_pgid: leader?.pid ?? null,
    harness_started: leader?.started ?? null,
  });
}

/** True for a whole id: part of one, in a note that an agent has changed, would mark runs of others. */
function isRunId(value: unknown): value is string {
  return typeof value === "string" && /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/.test(value);
}

/** Ends what a tick that was killed has left running; its lock is ours by now. */
async function sweepLastRun(dir: string, summary: Summary): Promise<void> {
  const note = readLockNote(join(dir, ".state.lock"));
  if (note === null || !isRunId(note.run_id) || note.host !== Deno.hostname()) return;
  // A group whose leader is gone, or was never noted, may by now be somebody else's.
  const leader = (await listProcesses()).find(({ pid, started }) =>
    pid === note.harness_pgid && started === note.harness_started
  );
  const { found: count } = await endRun(leader ?? null, note.run_id);
  if (count > 0) {
    summary.warnings.push(`ended ${count} process(es) that an earlier tick left running`);
  }
}

function isOlderThan(path: string, ageMs: number): boolean {
  return Date.now() - (Deno.lstatSync(path).mtime?.getTime() ?? 0) > ageMs;
}

/** Removes scratch folders and half-written files of ticks that were killed. */
function removeScratch(dir: string): void {
  for (const { name } of [...Deno.readDirSync(dir)]) {
    const path = join(dir, name);
    const isOldTemporary = /^\..+\.tmp-\d+$/.test(name) &&
      isOlderThan(path, SCRATCH_AGE_MS);
    if (name.startsWith(".snapshot-") || isOldTemporary) Deno.removeSync(path, { recursive: true });
  }
}

/** The environment of a harness: the person's, less and more what loop.json and the tick say. */
function buildHarnessEnv(
  tick: Tick,
  role: RoleName,
  own: Readonly<Record<string, string>> = tick.config.harness?.env ?? {},
): Record<string, string> {
  const env: Record<string, string> = { ...Deno.env.toObject(), ...own };
  const unset = tick.config.harness?.unset_env ?? [];
  const removed = [...unset, "AUTOMATON_NO_LOOP_LOCK", "AUTOMATON_OP_FILE"];
  for (const name of removed) delete env[name];
  return {
    ...env,
    PWD: tick.cwd,
    AUTOMATON_HOME: tick.framework,
    AUTOMATON_PROJECT: tick.project,
    AUTOMATON_LOOP: tick.loop,
    AUTOMATON_ROLE: role,
    AUTOMATON_TASK: tick.task.name,
    AUTOMATON_RUN_ID: tick.runId,
    ...(role === "orchestrate" ? { AUTOMATON_OP_FILE: outputPath(tick, "orchestrate.op") } : {}),
  };
}

/** The model that a role is to use; undefined where neither loop.json nor models.json names one. */
function findModel(tick: Tick, role: RoleName): string | undefined {
  return tick.config.roles?.[role]?.model ?? tick.models?.default;
}

/** A role's command with its model, before tokens are filled in. */
function chooseCommand(tick: Tick, role: RoleName): { command: string[]; isDefault: boolean } {
  const { command, model_args } = tick.config.harness ?? {};
  const own = tick.config.roles?.[role]?.command ?? command;
  const words = [...own ?? DEFAULT_HARNESS.command];
  const modelArgs = model_args ?? (own === undefined ? DEFAULT_HARNESS.model_args : []);
  const isModelMissing = findModel(tick, role) !== undefined && !hasModelToken(words);
  return {
    command: isModelMissing ? [...words, ...modelArgs] : words,
    isDefault: own === undefined,
  };
}

const hasModelToken = (words: readonly string[]): boolean =>
  words.some((word) => word.includes("{model}"));

/** What keeps a role's model from its harness; null when nothing does. */
function findModelProblem(tick: Tick, role: RoleName): string | null {
  const { command } = chooseCommand(tick, role);
  const env = { ...tick.config.harness?.env, ...tick.config.roles?.[role]?.env };
  const model = findModel(tick, role);
  const isTold = hasModelToken([...command, ...Object.values(env)]);
  if (model === undefined && isTold) {
    return `{model} in the ${role} command stays as it is, since no model is known: put it into harness.model_args`;
  }
  if (tick.config.roles?.[role]?.model === undefined || isTold) return null;
  return `nothing tells the ${role} harness its model ${model}: put it into harness.model_args`;
}

/** Builds what a role's harness is run with; the prompt has been written. */
function buildRequest(tick: Tick, role: RoleName, promptPath: string): HarnessRequest {
  const harness = tick.config.harness ?? {};
  const { command, isDefault } = chooseCommand(tick, role);
  const stdin = harness.stdin ?? (isDefault ? DEFAULT_HARNESS.stdin : "none");
  const model = findModel(tick, role);
  const prompt = readTextIfPresent(promptPath) ?? "";
  const values: Record<string, string> = {
    ...commonValues(tick),
    [harness.prompt_var ?? "{prompt}"]: promptPath,
    "{prompt_content}": prompt,
    [harness.cwd_var ?? "{cwd}"]: tick.cwd,
    [harness.output_var ?? "{output}"]: outputPath(
      tick,
      role === "implement" ? "implement.json" : `${role}.json`,
    ),
    "{artifact}": outputPath(tick, "implement.json"),
    "{loop_dir}": tick.dir,
    "{framework}": tick.framework,
    "{role}": role,
    "{tick}": `${tick.number}`,
    ...(role === "orchestrate" ? { "{verdict}": outputPath(tick, "verdict.json") } : {}),
    ...(model === undefined ? {} : { "{model}": model }),
  };
  const env = {
    ...(isDefault ? DEFAULT_HARNESS.env : {}),
    ...harness.env,
    ...tick.config.roles?.[role]?.env,
  };
  return {
    label: role,
    argv: command.map((element) => substituteTokens(element, values)),
    env: buildHarnessEnv(
      tick,
      role,
      Object.fromEntries(
        Object.entries(env).map(([name, text]) => [name, substituteEnv(text, values)]),
      ),
    ),
    stdin: stdin === "prompt" ? prompt : null,
    timeoutMs: sessionTimeoutMs(tick),
    idleTimeoutMs: (harness.idle_timeout_seconds ?? 0) * 1000,
    usage: harness.usage,
  };
}

// --- Worktree ---

/** One entry of `git worktree list --porcelain`. */
export interface WorktreeEntry {
  readonly path: string;
  readonly lockReason: string | null;
}

/** Parses `git worktree list --porcelain` (git 2.17 to 2.47). */
export function parseWorktreeList(text: string): WorktreeEntry[] {
  return text.split("\n\n").filter((block) => block.startsWith("worktree ")).map((block) => {
    const lines = block.split("\n");
    const lock = lines.find((line) => line === "locked" || line.startsWith("locked "));
    return {
      path: lines[0]!.slice("worktree ".length),
      lockReason: lock === undefined ? null : lock.slice("locked ".length) || "no reason given",
    };
  });
}

/** Runs git; a failure skips the tick with git's own words. */
async function git(cwd: string, args: readonly string[]): Promise<string> {
  const { code, stdout, stderr } = await runGit(cwd, args);
  if (code === 0) return decodeAnswer(stdout);
  const words = lastLines(stderr) || `exit code ${code}`;
  throw new SkipError("worktree_failed", `git ${args[0]} ${args[1] ?? ""}: ${words}`);
}

const decodeAnswer = (stdout: Uint8Array) => new TextDecoder().decode(stdout).replace(/\r?\n$/, "");

const lastLines = (text: string) =>
  text.split("\n").filter((line) => line !== "").slice(-3).join(" ");

/**
 * Runs a git that fills folders as a harness is run: filters and hooks that it starts end with it, also
 * when this process is killed.
 *
 * @returns What went wrong in words, null for nothing.
 */
async function runFillingGit(
  tick: OpenLoop,
  cwd: string,
  args: readonly [command: string, action: string, ...rest: string[]],
): Promise<string | null> {
  const outcome = await runHarness({ ...tick, cwd }, {
    label: args[0],
    argv: ["git", ...GIT_FLAGS, ...args],
    env: {
      ...Deno.env.toObject(),
      ...GIT_ENV,
      AUTOMATON_PROJECT: tick.project,
      AUTOMATON_LOOP: tick.loop,
      AUTOMATON_ROLE: "verify",
      AUTOMATON_RUN_ID: tick.runId,
    },
    stdin: null,
    timeoutMs: shorterTimeout(tick, GIT_CHECKOUT_TIMEOUT_MS),
    idleTimeoutMs: 0,
  });
  if (outcome.result === "ok") return null;
  if (outcome.result === "stopped") throw new StoppedError(outcome.message);
  const words = [outcome.message, lastLines(outcome.stderrTail)].filter((each) => each !== "");
  return `git ${args[0]} ${args[1]}: ${words.join(": ")}`;
}

async function gitOrNull(cwd: string, args: readonly string[]): Promise<string | null> {
  const { code, stdout } = await runGit(cwd, args);
  return code === 0 ? decodeAnswer(stdout) : null;
}

function realPathOrNull(path: string): string | null {
  try {
    return Deno.realPathSync(path);
  } catch {
    return null; // Nothing there.
  }
}

/** Decides where the harness works and makes the worktree when there is none. */
async function prepareWorkFolder(tick: OpenLoop): Promise<WorkFolder> {
  const { code, stderr } = await runGit(tick.project, ["rev-parse", "--show-toplevel"]);
  const head = code === 0
    ? await gitOrNull(tick.project, ["rev-parse", "--verify", "-q", "HEAD"])
    : null;
  const inProject = { cwd: tick.project, isGit: code === 0, base: head };
  if (tick.config.blast_radius?.worktree === false) return inProject;
  const isGone = code === null && /not found|no such file/i.test(stderr);
  const isNone = code !== null && code !== 0 && stderr.includes("not a git repository");
  const isKnown = tick.state.worktree_path !== null || hasGitAbove(tick.project);
  if (isKnown && (code === null || isNone)) {
    throw new SkipError("worktree_failed", `git rev-parse: ${stderr}`);
  }
  if (isGone) {
    warn(tick, `git cannot be run (${stderr}): the harness works in the project itself`);
    return inProject;
  }
  if (isNone) {
    warn(tick, "the project is no git repository: the harness works in the project itself");
    return inProject;
  }
  if (code !== 0 && stderr.includes("must be run in a work tree")) {
    throw new SkipError(
      "worktree_failed",
      "the project is a bare repository, which has no files to work on: use a worktree or clone of it",
    );
  }
  if (code !== 0) throw new SkipError("worktree_failed", `git rev-parse: ${stderr}`);
  const path = join(Deno.realPathSync(tick.dir), "worktree");
  const base = tick.isDryRun ? null : await openWorktree(tick, path);
  return { cwd: path, isGit: true, base };
}

/** True where a folder or one above it has been a repository. */
function hasGitAbove(folder: string): boolean {
  for (let path = folder;; path = dirname(path)) {
    if (isAnythingAt(join(path, ".git"))) return true;
    if (dirname(path) === path) return false;
  }
}

/** Makes the worktree where it is missing; returns the commit that its changes are told against. */
async function openWorktree(tick: OpenLoop, path: string): Promise<string> {
  await excludeWorktrees(tick);
  const isThere = await isUsableWorktree(tick, path);
  const { state } = tick;
  const base = isThere && typeof state.base_commit === "string" ? null : await resolveBase(tick);
  const isNewBranch = base !== null && !isThere && await addWorktree(tick, path, base);
  await removeStaleLocks(tick, path);
  await checkReadable(path);
  await initSubmodules(tick, path);
  state.worktree_path = path;
  state.worktree_branch = await gitOrNull(path, ["symbolic-ref", "--short", "-q", "HEAD"]);
  if (state.worktree_branch !== branchName(tick)) {
    warn(
      tick,
      `the worktree is on ${state.worktree_branch ?? "no branch"}, not on ${branchName(tick)}`,
    );
  }
  if (base !== null) {
    // What an earlier branch of the loop came from says nothing of this one.
    if (isNewBranch) [state.base_branch, state.base_commit] = [base.branch, base.commit];
    state.base_branch ??= base.branch;
    state.base_commit ??= await gitOrNull(path, ["merge-base", base.commit, "HEAD"]) ?? base.commit;
  }
  return await findDiffBase(path, state.base_branch ?? null, state.base_commit!);
}

/** Where the loop's branch left its base: further on than at first once the base was merged in again. */
async function findDiffBase(path: string, branch: string | null, commit: string): Promise<string> {
  if (branch === null) return commit;
  const merged = await gitOrNull(path, ["merge-base", await findFullRef(path, branch), "HEAD"]);
  if (merged === null) return commit;
  const { code } = await runGit(path, ["merge-base", "--is-ancestor", commit, merged]);
  return code === 0 ? merged : commit;
}

const branchName = (tick: OpenLoop) => `loop/${tick.loop}`;

/** Keeps loops' worktrees out of `git status` by the repository's own exclude file. */
async function excludeWorktrees(tick: OpenLoop): Promise<void> {
  const path = resolve(
    tick.project,
    await git(tick.project, ["rev-parse", "--git-path", "info/exclude"]),
  );
  const prefix = await git(tick.project, ["rev-parse", "--show-prefix"]);
  const pattern = `${prefix === "" ? "" : "**/"}.automaton/loops/*/worktree`;
  const text = readTextIfPresent(path) ?? "";
  if (text.split(/\r?\n/).includes(pattern)) return;
  ensureDirSync(dirname(path));
  writeFileAtomic(path, `${text}${text === "" || text.endsWith("\n") ? "" : "\n"}${pattern}\n`);
}

/** The branch and commit that a new worktree starts from. */
async function resolveBase(tick: OpenLoop): Promise<{ branch: string | null; commit: string }> {
  const { project, config } = tick;
  const commitOf = (name: string) =>
    gitOrNull(project, ["rev-parse", "--verify", "-q", `${name}^{commit}`]);
  const declared = config.blast_radius?.base;
  if (declared !== undefined) {
    const commit = await commitOf(declared);
    if (commit !== null) return { branch: declared, commit };
    throw new SkipError(
      "worktree_failed",
      `blast_radius.base "${declared}" is no branch of this repository`,
    );
  }
  const remote = await gitOrNull(project, [
    "symbolic-ref",
    "--short",
    "-q",
    "refs/remotes/origin/HEAD",
  ]);
  const current = await gitOrNull(project, ["symbolic-ref", "--short", "-q", "HEAD"]);
  for (const branch of [remote, current]) {
    const commit = branch === null ? null : await commitOf(branch);
    if (commit !== null) return { branch, commit };
  }
  const head = await commitOf("HEAD");
  if (head !== null) return { branch: null, commit: head };
  throw new SkipError("worktree_failed", "the repository has no commit yet: make the first one");
}

/** How git locks a worktree until it has filled it (git 2.39, builtin/worktree.c). */
const UNFILLED = "initializing";

async function findWorktree(tick: OpenLoop, path: string): Promise<WorktreeEntry | null> {
  const entries = parseWorktreeList(await git(tick.project, ["worktree", "list", "--porcelain"]));
  return entries.find((each) => each.path === path || realPathOrNull(each.path) === path) ?? null;
}

/**
 * True when the worktree is there, registered and whole; else what stands in its place is cleared.
 *
 * @param path Without links, so that a link in its place, to the person's checkout say, is no worktree.
 */
async function isUsableWorktree(tick: OpenLoop, path: string): Promise<boolean> {
  if (await isWholeWorktree(tick, path)) return true;
  // Where the project was moved, worktree and repository look for each other in their old places.
  const isLost = isFile(join(path, ".git")) && (await findWorktree(tick, path)) === null;
  if (isLost) {
    await gitOrNull(tick.project, ["worktree", "repair", path]);
    if (await isWholeWorktree(tick, path)) return true;
  }
  const entry = await findWorktree(tick, path);
  if (entry?.lockReason === UNFILLED) {
    // Of a tick that was killed: no agent has ever worked there.
    await git(tick.project, ["worktree", "remove", "--force", "--force", path]);
    return false;
  }
  if (entry !== null && entry.lockReason !== null) {
    throw new SkipError(
      "worktree_failed",
      `the worktree is missing but locked (${entry.lockReason}); git worktree unlock ${path}`,
    );
  }
  if (isAnythingAt(path)) {
    const aside = `${path}.${new Date().toISOString().replace(/[-:.]/g, "")}`;
    Deno.renameSync(path, aside);
    warn(tick, `"${path}" was no worktree of this repository and is now ${aside}`);
  }
  // Not "prune", which would forget a person's worktrees on disks that are not there now.
  if (entry !== null) await git(tick.project, ["worktree", "remove", "--force", entry.path]);
  return false;
}

async function isWholeWorktree(tick: OpenLoop, path: string): Promise<boolean> {
  const entry = await findWorktree(tick, path);
  return entry !== null && entry.lockReason !== UNFILLED && realPathOrNull(path) === path &&
    await isOwnCheckout(tick, path);
}

function isFile(path: string): boolean {
  try {
    return Deno.lstatSync(path).isFile;
  } catch {
    return false; // Nothing there.
  }
}

/** True for the top of a checkout with a HEAD and an index of its own, not those of the project. */
async function isOwnCheckout(tick: OpenLoop, path: string): Promise<boolean> {
  const args = ["rev-parse", "--show-toplevel"];
  const { code, stdout, stderr } = await runGit(path, args);
  if (code !== 0 && stderr.includes("not a git repository")) return false;
  // Any other failure says nothing about the worktree, which may hold work that is nowhere else: once more.
  const top = code === 0 ? decodeAnswer(stdout) : await git(path, args);
  const [own, persons] = (await Promise.all(
    [path, tick.project].map((folder) => git(folder, ["rev-parse", "--absolute-git-dir"])),
  )).map(realPathOrNull);
  return realPathOrNull(top) === path && own !== null && own !== persons;
}

/** @returns True when the branch was made with it. */
async function addWorktree(
  tick: OpenLoop,
  path: string,
  base: { commit: string },
): Promise<boolean> {
  const branch = branchName(tick);
  const exists =
    await gitOrNull(tick.project, ["rev-parse", "--verify", "-q", `refs/heads/${branch}`]) !== null;
  const target = exists ? [path, branch] : ["-b", branch, path, base.commit];
  const problem = await runFillingGit(tick, tick.project, ["worktree", "add", ...target]);
  if (problem === null) return !exists;
  if (!(await isWholeWorktree(tick, path))) throw new SkipError("worktree_failed", problem);
  // All is there: it was a hook for checkouts that failed.
  warn(tick, problem);
  return !exists;
}

/** Removes git's locks of a worktree whose git was killed: with them nothing could be committed again. */
async function removeStaleLocks(tick: OpenLoop, path: string): Promise<void> {
  const names = ["index.lock", "HEAD.lock", `refs/heads/${branchName(tick)}.lock`];
  const args = ["rev-parse", ...names.flatMap((name) => ["--git-path", name])];
  for (const name of (await git(path, args)).split("\n")) {
    const lock = resolve(path, name);
    if (!existsSync(lock) || !isOlderThan(lock, STALE_LOCK_MS)) continue;
    Deno.removeSync(lock);
    warn(tick, `removed "${lock}", which a git that was killed left behind`);
  }
}

/** Refuses a worktree of which git cannot tell what has changed in it: nobody could judge the work. */
async function checkReadable(path: string): Promise<void> {
  const { code, stderr } = await runGit(path, ["diff-index", "--cached", "--quiet", "HEAD"]);
  if (code === 0 || code === 1) return;
  throw new SkipError(
    "worktree_failed",
    `git cannot read the branch or the index of "${path}" (${
      lastLines(stderr)
    }): mend it, or remove the folder and have it made anew`,
  );
}

/** Fills submodules that a fresh worktree has empty. */
async function initSubmodules(tick: OpenLoop, path: string): Promise<void> {
  if (!existsSync(join(path, ".gitmodules"))) return;
  const status = await git(path, ["submodule", "status", "--recursive"]);
  if (!status.split("\n").some((line) => line.startsWith("-"))) return;
  const problem = await runFillingGit(tick, path, ["submodule", "update", "--init", "--recursive"]);
  if (problem !== null) throw new SkipError("worktree_failed", problem);
}

/** What a work folder holds at one moment, but for what git ignores. */
interface Snapshot {
  /** To compare: the tree, the commit that is checked out, what git could not read. */
  readonly id: string;
  /** The difference to the base: committed, staged, unstaged and untracked. */
  readonly diff: string;
}

/**
 * Takes a snapshot of the work folder; null where git cannot tell. Objects go to a throw-away store, so
 * that the repository does not grow by them.
 */
async function takeSnapshot(tick: Tick): Promise<Snapshot | null> {
  if (!tick.isGit) return null;
  const store = Deno.makeTempDirSync({ dir: tick.dir, prefix: ".snapshot-" });
  try {
    const names = ["objects", "index"].flatMap((name) => ["--git-path", name]);
    const paths = await gitOrNull(tick.cwd, ["rev-parse", ...names]);
    const [objects, index] = (paths ?? "").split("\n").map((path) => resolve(tick.cwd, path));
    if (objects === undefined || index === undefined) return null;
    const env = {
      // A filter that hangs is ended with the run.
      AUTOMATON_RUN_ID: tick.runId,
      GIT_INDEX_FILE: join(store, "index"),
      GIT_OBJECT_DIRECTORY: join(store, "objects"),
      // Quoted, since a colon separates paths in it.
      GIT_ALTERNATE_OBJECT_DIRECTORIES: `"${objects.replace(/["\\]/g, "\\$&")}"`,
    };
    Deno.mkdirSync(env.GIT_OBJECT_DIRECTORY);
    if (existsSync(index)) {
      // Opening a pipe in its place would never end.
      if (!Deno.statSync(index).isFile) return null;
      Deno.copyFileSync(index, env.GIT_INDEX_FILE);
    }
    return await readSnapshot(tick, env, join(store, "diff"));
  } finally {
    Deno.removeSync(store, { recursive: true });
  }
}

/** Takes from an index the marks by which git passes over changes of files that are there. */
async function showHiddenFiles(cwd: string, env: Record<string, string>): Promise<void> {
  const { stdout } = await runGit(cwd, ["ls-files", "-v", "-z"], { env });
  const hidden = new TextDecoder().decode(stdout).split("\0")
    .filter((entry) => /^[a-zS] /.test(entry) && existsSync(join(cwd, entry.slice(2))))
    .map((entry) => entry.slice(2));
  for (let from = 0; from < hidden.length; from += 500) {
    const marks = ["--no-assume-unchanged", "--no-skip-worktree"];
    for (const mark of marks) {
      await runGit(cwd, ["update-index", mark, "--", ...hidden.slice(from, from + 500)], { env });
    }
  }
}

async function readSnapshot(
  tick: Tick,
  env: Record<string, string>,
  diffPath: string,
): Promise<Snapshot | null> {
  const { cwd, base } = tick;
  const outside = await isAutomatonShown(tick) ? ["--", ".", ":(exclude,top).automaton"] : [];
  const timeoutMs = GIT_CHECKOUT_TIMEOUT_MS;
  await showHiddenFiles(cwd, env);
  // A file that cannot be read, or a repository without a commit within this one, is left out and told.
  const added = await runGit(cwd, ["add", "-A", "--ignore-errors", ...outside], { env, timeoutMs });
  const written = await runGit(cwd, ["write-tree"], { env });
  // One that was cut short has seen nothing.
  if (added.code === null || written.code !== 0) {
    warn(tick, `the work folder cannot be compared: ${added.stderr} ${written.stderr}`);
    return null;
  }
  const tree = new TextDecoder().decode(written.stdout).trim();
  const head = await gitOrNull(cwd, ["rev-parse", "--verify", "-q", "HEAD"]);
  const unread = added.code === 0 ? "" : `git could not read all files: ${added.stderr}\n`;
  const inside = await describeSubmodules(cwd);
  let diff = "";
  if (base !== null) {
    const flags = ["--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short"];
    const range = [`--output=${diffPath}`, base, tree];
    const { code, stderr } = await runGit(cwd, ["diff", ...flags, ...range], { env, timeoutMs });
    if (code !== 0) {
      warn(tick, `the diff cannot be made: ${stderr}`);
      return null;
    }
    diff = readStart(diffPath, MAX_DIFF_BYTES);
  }
  return { id: `${tree} ${head} ${unread}${inside}`, diff: `${unread}${diff}${inside}` };
}

/** Uncommitted changes within submodules, of which the tree holds only the commit. */
async function describeSubmodules(cwd: string): Promise<string> {
  if (!existsSync(join(cwd, ".gitmodules"))) return "";
  const script = "git diff HEAD; git status --porcelain --untracked-files=all";
  const text = await gitOrNull(cwd, ["submodule", "--quiet", "foreach", "--recursive", script]);
  return (text ?? "").slice(0, MAX_DIFF_BYTES);
}

/** True where a tick's own files are among those of the work folder; git refuses to exclude ignored ones. */
async function isAutomatonShown(tick: Tick): Promise<boolean> {
  if (tick.cwd !== tick.project) return false;
  return (await runGit(tick.cwd, ["check-ignore", "-q", ".automaton"])).code !== 0;
}

/** The start of a file, with a mark where it is longer. */
function readStart(path: string, maxBytes: number): string {
  using file = Deno.openSync(path, { read: true });
  const bytes = new Uint8Array(maxBytes + 1);
  let length = 0;
  for (let count: number | null = 1; count !== null && length < bytes.length;) {
    count = file.readSync(bytes.subarray(length));
    length += count ?? 0;
  }
  const text = new TextDecoder().decode(bytes.subarray(0, Math.min(length, maxBytes)));
  return length > maxBytes ? text + TRUNCATION_MARK : text;
}

// --- Work ---

/** What a work source found: a task, and the words to create it with where there is none yet. */
interface WorkItem {
  readonly task: string;
  readonly title: string;
}

/** Shows a task; null where there is none that can be used. */
async function viewTask(tick: OpenLoop, name: string): Promise<TaskView | null> {
  const { json, code } = await runProgram(tick, "status", [`--task=${name}`]);
  return code === 0 && json !== null && typeof json.phase === "string"
    ? json as unknown as TaskView
    : null;
}

function mayWorkIn(tick: OpenLoop, phase: string): boolean {
  return (tick.config.allowed_phases ?? LOOP_DEFAULTS.allowedPhases).includes(phase) &&
    phase !== "complete" && phase !== "human_intervention";
}

/** The folder that a work source names: `~` is the home folder, `{framework}` the framework's. */
function workSourceProject(tick: OpenLoop): string {
  const named = tick.config.work_source?.project;
  if (named === undefined) return tick.project;
  const home = readEnv("HOME") ?? readEnv("USERPROFILE") ?? "~";
  const expanded = substituteTokens(named, { "{framework}": tick.framework }).replace(
    /^~(?=[/\\]|$)/,
    () => home,
  );
  return resolve(tick.project, expanded);
}

/** Findings of the audit that somebody can work on, the worst first. */
async function listAuditWork(tick: OpenLoop): Promise<WorkItem[]> {
  const project = workSourceProject(tick);
  const { json, problem } = await runProgram({ ...tick, project }, "status", ["--audit"]);
  if (json === null || !Array.isArray(json.violations)) {
    throw new SkipError("gate_failed", `the audit failed: ${problem}`);
  }
  const items: WorkItem[] = [];
  for (const violation of json.violations) {
    if (!isRecord(violation) || typeof violation.message !== "string") continue;
    // A loop does not keep its own house: what is wrong with it is for a person to see.
    if (violation.task === null && violation.loop === tick.loop) continue;
    const task = typeof violation.task === "string" ? violation.task : slugify(violation.message);
    if (task !== null && NAME_PATTERN.test(task)) items.push({ task, title: violation.message });
  }
  return items;
}

function listBacklogWork(tick: OpenLoop): WorkItem[] {
  const area = tick.config.work_source?.area ?? "loops";
  const inner = join("design", area, "BACKLOG.md");
  const paths = [workSourceProject(tick), tick.framework].map((folder) => join(folder, inner));
  const text = paths.map(readTextIfPresent).find((each) => each !== null) ?? null;
  if (text === null) {
    throw new SkipError("no_work", `there is no backlog: neither ${paths.join(" nor ")}`);
  }
  const seen = new Set<string>();
  return listBacklogItems(text).flatMap(({ name, text: title }) => {
    const problem = name === null
      ? "has no words to name a task by: add a **name** to it"
      : seen.has(name)
      ? `names the task ${name}, as one above it does: it is passed over`
      : null;
    if (name !== null && problem === null) {
      seen.add(name);
      return [{ task: name, title }];
    }
    warn(tick, `backlog item "${title}" ${problem}`);
    return [];
  });
}

/** Finds this tick's task by the loop's work source and makes it the loop's own. */
async function findWork(tick: OpenLoop): Promise<TaskView> {
  let kind = tick.config.work_source?.kind;
  if (kind === undefined || !["single", "audit", "backlog"].includes(kind)) {
    warn(
      tick,
      `work_source.kind is ${
        kind === undefined ? "missing" : `the unknown "${kind}"`
      }: taken as single`,
    );
    kind = "single";
  }
  const current = tick.state.current_task;
  const view = current === null ? null : await viewTask(tick, current);
  // A task that is begun is brought to its end before the next one is picked.
  if (view !== null && mayWorkIn(tick, view.phase)) return view;
  if (kind === "single") {
    throw new SkipError(
      "no_current_task",
      `no current task; status --claim-loop-task ${tick.loop} --task NAME gives it one`,
    );
  }
  for (const item of kind === "audit" ? await listAuditWork(tick) : listBacklogWork(tick)) {
    const task = await openWorkItem(tick, item);
    if (task !== null) return task;
  }
  throw new SkipError(
    "no_work",
    kind === "audit"
      ? "the audit finds nothing to work on"
      : "the backlog has no open item to work on",
  );
}

/** Claims a work item's task, made when it is missing; null when there is nothing to do in it. */
async function openWorkItem(tick: OpenLoop, { task, title }: WorkItem): Promise<TaskView | null> {
  const tasks = join(tick.project, ".automaton", "tasks");
  if (isDirectory(join(tasks, "complete", task))) return null;
  if (!isDirectory(join(tasks, task))) {
    const line = truncateText(toOneLine(title), 1900);
    if (tick.isDryRun) return describeFutureTask(task, line, join(tasks, task));
    const { code, problem } = await runProgram(tick, "status", [
      `--create-task=${task}`,
      `--title=${line}`,
    ]);
    if (code !== 0) throw new SkipError("gate_failed", problem);
  }
  const view = await viewTask(tick, task);
  if (view === null || !mayWorkIn(tick, view.phase)) return null;
  if (tick.isDryRun) return view;
  const claim = await runProgram(tick, "status", [
    `--claim-loop-task=${tick.loop}`,
    `--task=${task}`,
  ], true);
  if (claim.code !== 0) throw new SkipError("task_claimed_by_other_loop", claim.problem);
  tick.state.current_task = task; // As the claim has written it: a counted failure saves this state.
  return view;
}

/** A task that a dry run would have made. */
function describeFutureTask(name: string, title: string, dir: string): TaskView {
  return {
    name,
    title,
    phase: "research",
    dir,
    document: "RESEARCH.md",
    has_document: false,
    next_phase: "design",
    needs_approval: false,
    history: [],
  };
}

// --- Tick ---

/** Asks the gate; whatever is not "ok" ends the tick. */
async function passGate(tick: Wake): Promise<void> {
  const args = [`--check-gate=${tick.loop}`, ...(tick.isDryRun ? ["--dry-run"] : [])];
  const { json, problem, warnings } = await runProgram(tick, "status", args, true);
  tick.summary.warnings.push(...warnings);
  if (json === null || typeof json.ok !== "boolean") throw new SkipError("gate_failed", problem);
  if (json.ok) return;
  const reason = `${json.reason}`;
  if (json.error !== undefined) throw new SkipError("gate_failed", `${json.error}`);
  const word = reason.split(":", 1)[0]!;
  const known = SKIP_REASONS.find((each) => each === word) ?? "gate_failed";
  throw new SkipError(known, describeClosedGate(tick.loop, reason, json.out_of_scope_files));
}

/** Why the gate is closed, and what a person does about it. */
function describeClosedGate(loop: string, reason: string, files: unknown): string {
  const [word, cause] = reason.split(":");
  const detail = Array.isArray(files) && files.length > 0
    ? `, changed outside the file scope: ${listFirst(files)}`
    : "";
  if (word === "halted") {
    return `the loop is halted (${cause}${detail}): status --loop-log ${loop}, then status --approve --loop ${loop}`;
  }
  return word === "paused" ? `the loop is paused: status --resume-loop ${loop}` : reason;
}

/** The first of some names, quoted. */
function listFirst(names: readonly unknown[]): string {
  const shown = names.slice(0, 5).map((name) => JSON.stringify(name)).join(", ");
  return names.length > 5 ? `${shown} and ${names.length - 5} more` : shown;
}

/** Between two roles: a signal or a pause ends the tick here, with nothing saved. */
async function checkStop(tick: Wake): Promise<void> {
  if (tick.stop.signal !== null) throw new StoppedError(`ended by ${tick.stop.signal}`);
  if (existsSync(pauseRequestFile(tick.dir))) await passGate(tick);
}

/** The smallest window that the roles' models have here, in tokens; one below the floor halts the loop. */
async function measureWindow(tick: OpenLoop): Promise<number> {
  const models = new Set(
    ROLES.filter((role) => role !== "orchestrate" || tick.config.roles?.orchestrate)
      .map((role) => tick.config.roles?.[role]?.model),
  );
  let window = Infinity;
  for (const model of models) {
    const args = ["--loop-mode", ...(model === undefined ? [] : [`--model=${model}`])];
    const { json, problem } = await runProgram(tick, "vram-detect", args);
    if (json === null || typeof json.loop_mode_eligible !== "boolean") {
      throw new SkipError("context_floor", problem);
    }
    const tokens = json.available_context_tokens;
    if (!json.loop_mode_eligible) {
      const found = typeof tokens === "number" ? `${tokens} tokens` : `unknown (${json.reason})`;
      const message = `the context window${
        model === undefined ? "" : ` of ${model}`
      } is ${found}, below ${json.floor_tokens} tokens`;
      if (tick.isDryRun) throw new SkipError("context_floor", message);
      throw new HaltError("human_intervention", message, "context_floor");
    }
    if (typeof tokens === "number") window = Math.min(window, tokens);
  }
  return window;
}

/** What a harness that did not do its work ends the tick with: a rate limit's wait, or a skip. */
function failureOf(tick: Tick, outcome: HarnessOutcome): HarnessFailure | BackoffError {
  const words = `${outcome.result}: ${outcome.message}`;
  const backoff = tick.config.harness?.backoff;
  if (backoff !== undefined && isRateLimit(outcome, backoff)) {
    const seconds = backoff.seconds ?? LOOP_DEFAULTS.backoffSeconds;
    const notBefore = new Date(Date.now() + seconds * 1000).toISOString();
    return new BackoffError(notBefore, `rate limit (${words}); no harness before ${notBefore}`);
  }
  const isTimeout = outcome.result === "timeout" || outcome.result === "idle_timeout";
  return new HarnessFailure(isTimeout ? "harness_timeout" : "harness_failed", words);
}

/** True when a failed run says of itself that it met a limit. */
function isRateLimit(
  { exitCode, stdoutTail, stderrTail }: HarnessOutcome,
  { patterns = [], exit_codes: exitCodes = [] }: {
    patterns?: readonly string[];
    exit_codes?: readonly number[];
  },
): boolean {
  if (exitCode !== null && exitCodes.includes(exitCode)) return true;
  const end = stdoutTail.trimEnd().split("\n").slice(-BACKOFF_LINES).join("\n");
  return patterns.some((pattern) => {
    const expression = new RegExp(pattern, "i");
    return expression.test(stderrTail) || expression.test(end);
  });
}

/** Files by which a loop is steered, and what they held: null for one that is not there. */
type Controls = ReadonlyMap<string, string | null>;

/** Reads what no session may change: the loop's settings and memory, the prompts, git's own files. */
async function readControls(tick: Tick): Promise<Controls> {
  const { dir, project, framework, cwd, isGit } = tick;
  const defaults = Object.values(DEFAULT_PROMPTS);
  const own = Object.values(tick.config.roles ?? {}).map((role) => role?.prompt ?? "")
    .filter((name) => name !== "" && isFileName(name));
  const paths = [
    join(dir, "loop.json"),
    join(dir, ".state.loop"),
    join(dir, ".state.loop.bak"),
    join(project, ".automaton", "models.json"),
    join(framework, "models.json"),
    ...[...defaults, ...own].flatMap((name) => [join(framework, "prompts", name), join(dir, name)]),
  ];
  if (isGit) {
    const names = ["config", "config.worktree", "info/exclude", "info/attributes"];
    const args = ["hooks", ...names].flatMap((name) => ["--git-path", name]);
    const [hooks, ...inner] = (await git(cwd, ["rev-parse", ...args])).split("\n")
      .map((path) => resolve(cwd, path));
    paths.push(join(cwd, ".git"), ...inner);
    // Hooks that the project keeps among its sources are sources: the file scope speaks of them.
    if (!hooks!.startsWith(join(cwd, "/"))) paths.push(...listFiles(hooks!));
    paths.push(...await listPersonalGitFiles(cwd));
  }
  const controls = new Map(paths.map((path) => [path, readControl(path)]));
  const settings = ["config", "--get-regexp", "^(core|diff|filter|include|includeif|status)\\."];
  if (!isGit) return controls;
  const { code, stdout, stderr } = await runGit(cwd, settings);
  // 1 means that there are none.
  if (code !== 0 && code !== 1) throw new SkipError("worktree_failed", `git config: ${stderr}`);
  return controls.set("git's settings", new TextDecoder().decode(stdout));
}

/** Files of a person by which git passes over others or runs programs on them. */
async function listPersonalGitFiles(cwd: string): Promise<string[]> {
  const home = readEnv("XDG_CONFIG_HOME") ?? join(readEnv("HOME") ?? "/", ".config");
  const files = [["core.excludesFile", "ignore"], ["core.attributesFile", "attributes"]] as const;
  return await Promise.all(files.map(async ([setting, name]) => {
    const named = await gitOrNull(cwd, ["config", "--type=path", "--get", setting]);
    return resolve(cwd, named ?? join(home, "git", name));
  }));
}

function listFiles(folder: string): string[] {
  return isDirectory(folder)
    ? [...Deno.readDirSync(folder)].map(({ name }) => join(folder, name))
    : [];
}

/**
 * True when a task's state was changed by something other than `status`, which writes the copy along
 * with it: a person may approve or claim the task at any time.
 */
async function isTaskTampered(dir: string, before: string | null): Promise<boolean> {
  const path = join(dir, ".state");
  for (const waitMs of [0, 1000]) {
    await sleep(waitMs); // The second look is for a save that was between state and copy.
    const now = readControl(path);
    if (now === before || now === readControl(`${path}.bak`) || !existsSync(dir)) return false;
  }
  return true;
}

/** A person's git notes there which branch follows which: that steers no loop. */
const BRANCH_SECTIONS = /^\[branch [^\n]*\n(?:[ \t][^\n]*\n)*/gm;

function readControl(path: string): string | null {
  try {
    const text = readTextIfPresent(path);
    return basename(path) === "config" ? text?.replace(BRANCH_SECTIONS, "") ?? null : text;
  } catch {
    return "(not a file that can be read)";
  }
}

/** True for a prompt of the framework that is as the remote has it: somebody has updated the checkout. */
async function isPublishedPrompt(
  framework: string,
  path: string,
  text: string | null,
): Promise<boolean> {
  if (text === null || dirname(path) !== join(framework, "prompts")) return false;
  const published = await gitOrNull(framework, ["show", `@{upstream}:./prompts/${basename(path)}`]);
  return published !== null && published === text.replace(/\r?\n$/, "");
}

/**
 * Halts the loop when a session changed what steers it. The state is put back as it was, so that a
 * counter that was set back does not count; changed settings stay for a person to see, with what they
 * were in outputs/.
 */
async function guardControls(tick: Tick, before: Controls, label: string): Promise<void> {
  const now = await readControls(tick);
  const known = new Set([...before.keys(), ...now.keys()]);
  const taskState = join(tick.task.dir, ".state");
  known.delete(taskState); // Others may change it, by status: see below.
  const changed: string[] = [];
  for (const path of known) {
    const text = now.get(path) ?? null;
    if ((before.get(path) ?? null) === text) continue;
    if (await isPublishedPrompt(tick.framework, path, text)) {
      warn(tick, `the framework was updated while ${label} was at work: ${path}`);
    } else changed.push(path);
  }
  const isLockOurs = tick.lock !== null && isSameFile(tick.lock, lockPath(tick)) &&
    isNoteOurs(tick);
  const isTampered = await isTaskTampered(tick.task.dir, before.get(taskState) ?? null);
  if (changed.length === 0 && isLockOurs && !isTampered) return;
  for (const path of changed) {
    const text = before.get(path) ?? null;
    if (text === null) continue;
    if (!basename(path).startsWith(".state.loop")) {
      writeFresh(outputPath(tick, `before-${basename(path)}`), text);
      continue;
    }
    // No file can be renamed onto a folder.
    if (isDirectory(path)) Deno.removeSync(path, { recursive: true });
    writeFileAtomic(path, text);
  }
  const names = [...changed];
  if (!isLockOurs) names.push(lockPath(tick));
  if (isTampered) names.push(taskState);
  throw new HaltError(
    "drift_detected",
    `${label} changed what steers the loop: ${names.join(", ")}`,
    null,
  );
}

/**
 * Halts the loop when the history of its task was rewritten, or grew by a step of a loop while no
 * orchestrator was at work.
 */
async function guardTask(tick: Tick, before: string | null, label: string): Promise<void> {
  const task = parseJsonOrNull(before ?? "");
  if (readControl(join(tick.task.dir, ".state")) === before) return;
  if (!isRecord(task) || !Array.isArray(task.history)) return;
  const view = await viewTask(tick, tick.task.name);
  if (view === null) return; // Unreadable: whatever needs the task says so.
  const kept = view.history.slice(0, task.history.length);
  const isRewritten = JSON.stringify(kept) !== JSON.stringify(task.history) ||
    view.history.at(-1)?.to !== view.phase;
  if (isRewritten) {
    throw new HaltError("drift_detected", `${label} rewrote the history of the task`, null);
  }
  const step = view.history.slice(task.history.length).find(({ by }) => by.startsWith("loop:"));
  if (step === undefined || label === "orchestrate") return;
  throw new HaltError("drift_detected", `${label} moved the task to ${step.to}`, null);
}

/** A file's identity and size; null where there is none. */
function readMark(path: string): { ino: number | null; size: number } | null {
  try {
    const { ino, size } = Deno.statSync(path);
    return { ino, size };
  } catch {
    return null;
  }
}

/** True while a log holds all that it held: longer by now, or moved aside whole. */
function isLogKept(path: string, before: ReturnType<typeof readMark>): boolean {
  return before === null || [path, `${path}.1`].map(readMark)
    .some((mark) => mark !== null && mark.ino === before.ino && mark.size >= before.size);
}

/** The commit of the branch that the loop's changes are told against; null where there is none. */
async function readBaseCommit({ state, cwd, isGit }: Tick): Promise<string | null> {
  const branch = state.base_branch ?? null;
  if (!isGit || branch === null) return null;
  const ref = await findFullRef(cwd, branch);
  return await gitOrNull(cwd, ["rev-parse", "--verify", "-q", `${ref}^{commit}`]);
}

/**
 * Halts the loop when a session moved its base branch onto work of the loop: from the next tick on neither
 * the verifier nor the drift check would see that work.
 */
async function guardBase(tick: Tick, before: string | null, label: string): Promise<void> {
  const after = await readBaseCommit(tick);
  if (before === null || after === null || after === before) return;
  const left = await gitOrNull(tick.cwd, ["merge-base", after, "HEAD"]);
  if (left === null) return;
  if ((await runGit(tick.cwd, ["merge-base", "--is-ancestor", left, before])).code === 0) return;
  const message =
    `${label} moved ${tick.state.base_branch}, the loop's base, onto the loop's own work`;
  throw new HaltError("drift_detected", message, null);
}

/** The person's checkout in one word to compare: commit, branch and uncommitted files. */
async function describeCheckout(tick: Tick): Promise<string | null> {
  if (!tick.isGit || tick.cwd === tick.project) return null;
  const [head, branch, status] = await Promise.all([
    gitOrNull(tick.project, ["rev-parse", "--verify", "-q", "HEAD"]),
    gitOrNull(tick.project, ["symbolic-ref", "-q", "HEAD"]),
    gitOrNull(tick.project, ["status", "--porcelain", "--", ".", ":(exclude,top).automaton"]),
  ]);
  return `${head} ${branch} ${status}`;
}

/** Runs what an agent steers, itself or by what it wrote, and halts the loop where that steered the loop. */
async function runGuarded(
  tick: Tick,
  request: HarnessRequest,
  role: RoleName | null = null,
): Promise<HarnessOutcome> {
  const [steering, checkout, base] = await Promise.all([
    readControls(tick),
    describeCheckout(tick),
    readBaseCommit(tick),
  ]);
  const taskState = join(tick.task.dir, ".state");
  const controls = new Map([...steering, [taskState, readControl(taskState)]]);
  const cost = readControl(costPath(tick));
  const logPath = join(tick.dir, ".state.log");
  const log = readMark(logPath);
  const run = () => runHarness(tick, request);
  const outcome = role === null ? await run() : await timed(tick.summary, role, run);
  const isSpendingKept = keepSpending(tick, cost);
  if (role !== null) noteUsage(tick, role, outcome.usage);
  await guardControls(tick, controls, request.label);
  await guardTask(tick, controls.get(taskState) ?? null, request.label);
  if (!isLogKept(logPath, log)) {
    throw new HaltError("drift_detected", `${request.label} shortened "${logPath}"`, null);
  }
  if (!isSpendingKept) {
    const message = `${request.label} took dollars off "${costPath(tick)}"`;
    throw new HaltError("drift_detected", message, null);
  }
  await guardBase(tick, base, request.label);
  if (await describeCheckout(tick) !== checkout) {
    warn(tick, `the project's own checkout changed while ${request.label} was at work`);
  }
  return outcome;
}

/** Starts a role's harness, once its prompt is written, and notes what it cost. */
async function runRole(
  tick: Tick,
  role: RoleName,
  values: Record<string, string>,
): Promise<HarnessOutcome> {
  await checkStop(tick);
  const promptPath = writePrompt(tick, role, values);
  tick.summary.artifacts[`${role}_prompt`] = promptPath;
  const request = buildRequest(tick, role, promptPath);
  const modelProblem = findModelProblem(tick, role);
  if (modelProblem !== null) warn(tick, modelProblem);
  const outcome = await runGuarded(tick, request, role);
  if (outcome.result === "stopped") {
    await checkStop(tick);
    throw new StoppedError(outcome.message);
  }
  if (outcome.leftOver > 0 && outcome.result === "ok") {
    warn(tick, `the ${role} harness left ${outcome.leftOver} process(es), which were ended`);
  }
  return outcome;
}

const costPath = ({ dir }: OpenLoop) => join(dir, "cost.json");

/** Dollars of a cost.json that count against a budget. */
function countSpending(text: string | null): number {
  const cost = parseJsonOrNull(text ?? "");
  return isRecord(cost) && cost.local !== true && Number(cost.total_usd) || 0;
}

/** Puts cost.json back where a session made its sum smaller, by which a budget would last longer. */
function keepSpending(tick: Tick, before: string | null): boolean {
  const path = costPath(tick);
  if (before === null || countSpending(readControl(path)) >= countSpending(before)) return true;
  if (isDirectory(path)) Deno.removeSync(path, { recursive: true });
  writeFileAtomic(path, before);
  return false;
}

/** Logs a run's cost and tokens, and adds its dollars to what the loop has spent. */
function noteUsage(tick: Tick, role: RoleName, usage: UsageReport | null): void {
  if (usage === null) return;
  const { costUsd, inputTokens, outputTokens } = usage;
  if (costUsd === null && inputTokens === null && outputTokens === null) return;
  const fields = { cost_usd: costUsd, input_tokens: inputTokens, output_tokens: outputTokens };
  logSafely(tick, "INFO", "USAGE", { tick: tick.number, role, ...fields });
  if (costUsd === null) return;
  tick.summary.cost_usd = (tick.summary.cost_usd ?? 0) + costUsd;
  const path = costPath(tick);
  try {
    const cost = parseJsonText(readTextIfPresent(path) ?? "{}", path);
    // A sum that cannot be read is never begun anew: the budget counts on it.
    checkFields(cost, [["total_usd", "a number from 0", isNumberFrom(0)]], path);
    const total = Number(cost.total_usd ?? 0);
    writeFileAtomic(path, `${JSON.stringify({ ...cost, total_usd: total + costUsd })}\n`);
  } catch (error) {
    warn(tick, `the cost cannot be added to "${path}": ${errorMessage(error)}`);
  }
}

/** Step 6: the harness works; what it made is the artifact, or the runner makes it from its traces. */
async function implement(tick: Tick): Promise<{ report: string; diff: string }> {
  const artifact = outputPath(tick, "implement.json");
  const before = await takeSnapshot(tick);
  const outcome = await runRole(tick, "implement", {});
  const after = await takeSnapshot(tick);
  if (outcome.result !== "ok") {
    const hasChanged = before !== null && after !== null && before.id !== after.id;
    const mayHaveWorked = ["exit_nonzero", "reported_error", "killed"].includes(outcome.result);
    const failure = failureOf(tick, outcome);
    // At a limit the verifier would get no answer either, and half of the work is no work to judge.
    if (failure instanceof BackoffError || !mayHaveWorked || !hasChanged) throw failure;
    warn(tick, `${outcome.message}, with changes left: they are verified`);
  }
  const diff = after?.diff ?? "";
  tick.summary.artifacts.artifact = artifact;
  const written = readArtifact(tick, artifact);
  if (written !== null) return { report: written, diff };
  const failure = outcome.result === "ok" ? "" : `# Outcome\n${outcome.message}\n\n`;
  const report = `${failure}# Output\n${(outcome.usage?.text ?? outcome.stdoutTail).trim()}\n`;
  writeFresh(artifact, `${report}\n# Changes against the base\n${diff}`);
  // A prompt that asks for the changes by their own token need not show them twice.
  const isDiffShown = readPromptTemplate(tick, "verify").includes("{diff}");
  return { report: isDiffShown ? report : Deno.readTextFileSync(artifact), diff };
}

/** What the harness wrote as its artifact, its start when it is long; null when it wrote none. */
function readArtifact(tick: Tick, path: string): string | null {
  if (!existsSync(path)) return null;
  if (!Deno.statSync(path).isFile) {
    warn(tick, `the artifact "${path}" is no regular file: it is passed over`);
    Deno.removeSync(path, { recursive: true });
    return null;
  }
  return readStart(path, MAX_ARTIFACT_BYTES);
}

/** Step 7: loop.json's own commands, which no verdict can overrule. */
async function runChecks(tick: Tick): Promise<CheckResult[]> {
  const results: CheckResult[] = [];
  for (const [index, command] of (tick.config.checks ?? []).entries()) {
    await checkStop(tick);
    const startedAt = performance.now();
    const outcome = await runGuarded(tick, {
      label: `check${index + 1}`,
      argv: command,
      // A check runs what an agent has written: it may ask status, never write by it.
      env: buildHarnessEnv(tick, "verify"),
      stdin: null,
      timeoutMs: sessionTimeoutMs(tick),
      idleTimeoutMs: 0,
    });
    if (outcome.result === "stopped") {
      await checkStop(tick);
      throw new StoppedError(outcome.message);
    }
    const output = [outcome.stdoutTail, outcome.stderrTail].map((text) => text.trim()).join("\n")
      .trim();
    results.push({
      command,
      ok: outcome.result === "ok",
      result: outcome.result,
      exit_code: outcome.exitCode,
      duration_ms: Math.round(performance.now() - startedAt),
      output: output.length > CHECK_OUTPUT_CHARS ? `…${output.slice(-CHECK_OUTPUT_CHARS)}` : output,
    });
  }
  if (results.length > 0) {
    const path = outputPath(tick, "checks.json");
    writeFresh(path, `${JSON.stringify(results, null, 2)}\n`);
    tick.summary.artifacts.checks = path;
    tick.summary.checks.push(...results);
  }
  return results;
}

/** Checks as a verifier and the next Implement read them; of a failed one's output the end. */
function renderChecks(results: readonly CheckResult[], outputChars = CHECK_OUTPUT_CHARS): string {
  return results.map(({ command, ok, result, exit_code, output }) => {
    const end = ok
      ? "passed"
      : `FAILED (${result}${exit_code === null ? "" : `, exit code ${exit_code}`})`;
    const shown = output.length > outputChars ? `…${output.slice(-outputChars)}` : output;
    return `$ ${quoteForSh(command)}\n${end}${ok || shown === "" ? "" : `\n${shown}`}`;
  }).join("\n\n");
}

/** Step 8: a second session judges; only what it prints counts, and only if it changed nothing. */
async function verify(
  tick: Tick,
  { report, diff, checks }: { report: string; diff: string; checks: readonly CheckResult[] },
): Promise<Verdict> {
  const before = await takeSnapshot(tick);
  const material = {
    "{artifact_content}": report,
    // Taken after the checks, which may have changed what the session left.
    "{diff}": before?.diff ?? diff,
    "{check_results}": renderChecks(checks),
  };
  const texts = Object.values({ ...commonValues(tick), ...material }).join("\n");
  const outcome = await runRole(tick, "verify", {
    ...material,
    "{verdict_nonce}": tick.verdictNonce,
  });
  const after = await takeSnapshot(tick);
  const answer = outcome.usage?.text ?? outcome.stdoutTail;
  const parsed = parseVerdict(answer, tick.verdictNonce, texts);
  if (parsed.verdict === null) {
    // A run without a verdict is a failed one: at a limit some agents say so and exit with 0.
    const failure = failureOf(tick, outcome);
    if (outcome.result !== "ok" || failure instanceof BackoffError) throw failure;
    throw new HaltError("verifier_failed", parsed.problem, null);
  }
  if (outcome.result !== "ok" && outcome.result !== "exit_nonzero") throw failureOf(tick, outcome);
  for (const warning of parsed.warnings) warn(tick, warning);
  const vetoes = checks.filter(({ ok }) => !ok).map(({ command }) =>
    `check failed: ${quoteForSh(command)}`
  );
  if (before?.id !== after?.id) {
    warn(tick, "the verifier changed the work folder: its verdict counts as a fail");
    vetoes.push("the verifier changed the work folder");
  } else if (tick.isGit && after === null) {
    vetoes.push("git cannot tell whether the verifier changed the work folder");
  }
  const details = renderChecks(checks.filter(({ ok }) => !ok), HINT_CHECK_CHARS);
  const verdict = applyVetoes(parsed.verdict, vetoes, details);
  const path = outputPath(tick, "verdict.json");
  writeFresh(path, `${JSON.stringify(verdict, null, 2)}\n`);
  tick.summary.artifacts.verdict = path;
  tick.summary.verdict = verdict;
  return verdict;
}

/** A verdict with what overrules it; a pass turned into a fail tells the next try what failed. */
function applyVetoes(verdict: Verdict, vetoes: readonly string[], details: string): Verdict {
  if (vetoes.length === 0) return verdict;
  // What a verifier that was content says of the next step is not what is to be done now.
  const own = verdict.pass === true ? "" : verdict.next_hint;
  const hint = own ||
    truncateText(details === "" ? vetoes.join("; ") : details, MAX_HINT_CHARS);
  return { ...verdict, pass: false, reasons: [...vetoes, ...verdict.reasons], next_hint: hint };
}

/** After a pass: the phase's document, from the artifact, where the agent could not write it. */
function writeMissingDocument(tick: Tick): void {
  const { document, dir, has_document } = tick.task;
  if (document === null || has_document || !isDirectory(dir)) return;
  const path = join(dir, document);
  if ((readTextIfPresent(path) ?? "").trim() !== "") return;
  const artifact = readArtifact(tick, outputPath(tick, "implement.json")) ?? "";
  const mark =
    `<!-- Written by loop-runner from the artifact of tick ${tick.number} of loop ${tick.loop}. -->`;
  writeFileAtomic(path, `${mark}\n\n${artifact}`);
}

/** Step 10: one step in the pipeline, by a session or by the built-in orchestrator. */
async function orchestrate(tick: Tick, verdict: Verdict): Promise<void> {
  if (verdict.pass === true) {
    await guardLastStep(tick);
    writeMissingDocument(tick);
  }
  if (!tick.config.roles?.orchestrate) return await takeBuiltInStep(tick, verdict);
  // Only this session's own step may use up the one that it has.
  const operation = outputPath(tick, "orchestrate.op");
  if (isAnythingAt(operation)) Deno.removeSync(operation, { recursive: true });
  const before = await takeSnapshot(tick);
  const outcome = await runRole(tick, "orchestrate", {
    "{verdict}": JSON.stringify(verdict),
    "{artifact_content}": readArtifact(tick, outputPath(tick, "implement.json")) ?? "",
  });
  if (outcome.result !== "ok") warn(tick, `${outcome.result}: ${outcome.message}`);
  await guardStep(tick, verdict);
  const after = await takeSnapshot(tick);
  if (before === null || after === null || before.id === after.id) return;
  throw new HaltError("drift_detected", "orchestrate changed the work after its verdict", null);
}

/** Looks for drift before the step that completes a task: no gate of a later tick would. */
async function guardLastStep(tick: Tick): Promise<void> {
  const isInWorktree = tick.cwd === tick.state.worktree_path;
  if (tick.task.next_phase !== "complete" || !isInWorktree) return;
  const args = ["--scope-check", `--loop=${tick.loop}`];
  const { json, problem } = await runProgram(tick, "status", args, true);
  if (json?.ok === true) return;
  const files = json?.out_of_scope_files;
  if (!Array.isArray(files)) throw new SkipError("gate_failed", problem);
  const message = `changed outside the file scope: ${listFirst(files)}`;
  throw new HaltError("drift_detected", message, null);
}

/** Halts the loop when a session took more than its one step, or went on against the verdict. */
async function guardStep(tick: Tick, verdict: Verdict): Promise<void> {
  const history = (await viewTask(tick, tick.task.name))?.history ?? [];
  const steps = history.slice(tick.task.history.length)
    .filter(({ by }) => by.startsWith("loop:"));
  const hasGoneOn = steps.some(({ to }) => to === tick.task.next_phase);
  const problem = steps.length > 1
    ? `took ${steps.length} steps instead of one`
    : hasGoneOn && verdict.pass !== true
    ? `moved the task on to ${tick.task.next_phase} although the verdict is a fail`
    : null;
  if (problem !== null) throw new HaltError("drift_detected", `orchestrate ${problem}`, null);
}

async function takeBuiltInStep(tick: Tick, verdict: Verdict): Promise<void> {
  await checkStop(tick);
  if (verdict.pass !== true) return;
  const { name, next_phase } = tick.task;
  // Asked anew: a person may have approved the task while the roles were at work.
  const needsApproval = (await viewTask(tick, name))?.needs_approval ?? tick.task.needs_approval;
  const target = needsApproval ? "human_intervention" : next_phase;
  if (target === null) return;
  const reason = needsApproval
    ? "passed; a person has to approve it"
    : `passed tick ${tick.number} of loop ${tick.loop}`;
  const { code, problem } = await runProgram(tick, "status", [
    `--transition=${target}`,
    `--task=${name}`,
    `--reason=${reason}`,
  ]);
  if (code !== 0) warn(tick, problem);
}

/** Step 11: the in-scope files of the worktree become a commit of the loop's branch. */
async function commitWork(tick: Tick, verdict: Verdict): Promise<void> {
  const when = tick.config.blast_radius?.commit ?? "on_pass";
  const isWanted = when === "always" || (when === "on_pass" && verdict.pass === true);
  if (!isWanted || tick.state.worktree_path === null || tick.cwd !== tick.state.worktree_path) {
    return;
  }
  const branch = await gitOrNull(tick.cwd, ["symbolic-ref", "--short", "-q", "HEAD"]);
  if (branch !== branchName(tick)) {
    const where = branch ?? "no branch";
    return warn(tick, `nothing is committed: the worktree is on ${where}, not ${branchName(tick)}`);
  }
  const status = await runGit(tick.cwd, [
    "status",
    "--porcelain",
    "-z",
    "--no-renames",
    "--untracked-files=all",
  ]);
  if (status.code !== 0) return warn(tick, `nothing is committed: ${status.stderr}`);
  const scope = tick.config.blast_radius?.file_scope;
  const inScope = new TextDecoder().decode(status.stdout).split("\0")
    .map((entry) => entry.slice(3).replace(/\/$/, ""))
    .filter((path) => path !== "" && isInScope(path, scope));
  const isUnnameable = (path: string) => path.includes("\uFFFD");
  const changed = inScope.filter((path) => !isUnnameable(path));
  if (changed.length < inScope.length) {
    const left = inScope.filter(isUnnameable).join(", ");
    warn(tick, `not committed, since their names are no UTF-8: ${left}`);
  }
  if (changed.length === 0) return;
  const list = outputPath(tick, "commit-paths");
  writeFresh(list, changed.join("\0"));
  const paths = [`--pathspec-from-file=${list}`, "--pathspec-file-nul"];
  const literal = { GIT_LITERAL_PATHSPECS: "1" };
  const added = await runGit(tick.cwd, ["add", "-A", ...paths], { env: literal });
  if (added.code !== 0) return warn(tick, `nothing is committed: ${added.stderr}`);
  // git commits a merge as a whole or not at all.
  const isMerge = await gitOrNull(tick.cwd, ["rev-parse", "-q", "--verify", "MERGE_HEAD"]) !== null;
  const identity = await runGit(tick.cwd, ["var", "GIT_COMMITTER_IDENT"]);
  const fallback = ["-c", "user.name=Automaton", "-c", "user.email=automaton@localhost"];
  const message =
    `loop(${tick.loop}): ${tick.task.name} tick ${tick.number}, score ${verdict.score}`;
  const outcome = await runGuarded(tick, {
    label: "commit",
    argv: [
      "git",
      ...(identity.code === 0 ? [] : fallback),
      "commit",
      "--quiet",
      "--no-gpg-sign",
      ...(isMerge ? [] : ["--only", ...paths]),
      "-m",
      message,
    ],
    env: {
      ...buildHarnessEnv(tick, "verify"),
      ...literal,
      GIT_EDITOR: "true",
      GIT_TERMINAL_PROMPT: "0",
    },
    stdin: null,
    timeoutMs: shorterTimeout(tick, COMMIT_TIMEOUT_MS),
    idleTimeoutMs: 0,
  });
  if (outcome.result === "ok") return;
  const words = lastLines(outcome.stderrTail);
  warn(tick, `nothing is committed: ${outcome.message}${words === "" ? "" : `: ${words}`}`);
}

/** How long a session may take; 0 for no limit. */
const sessionTimeoutMs = ({ config }: OpenLoop) =>
  (config.harness?.timeout_seconds ?? DEFAULT_TIMEOUT_S) * 1000;

/** A limit of the runner's own, or that of a session where that is shorter. */
function shorterTimeout(tick: OpenLoop, limitMs: number): number {
  const sessionMs = sessionTimeoutMs(tick);
  return sessionMs === 0 ? limitMs : Math.min(limitMs, sessionMs);
}

/** Runs the loop's own command for its completion, once. */
async function runCompletionHook(tick: Tick): Promise<void> {
  const argv = tick.config.hooks?.on_complete;
  if (argv === undefined) return;
  const outcome = await runHarness(tick, {
    label: "hook",
    argv,
    env: {
      ...buildHarnessEnv(tick, "verify"),
      AUTOMATON_EVENT: "complete",
      AUTOMATON_REASON: "complete",
    },
    stdin: null,
    timeoutMs: shorterTimeout(tick, HOOK_TIMEOUT_MS),
    idleTimeoutMs: 0,
  });
  if (outcome.result !== "ok") warn(tick, `the on_complete hook failed: ${outcome.message}`);
}

/** Step 12: the tick's one save, then the log line, then old outputs go. */
async function saveTick(tick: Tick, verdict: Verdict): Promise<void> {
  const { state, config } = tick;
  const window = config.brakes?.score_plateau_window ?? LOOP_DEFAULTS.plateauWindow;
  const after = await viewTask(tick, tick.task.name);
  const phase = after?.phase ?? tick.task.phase;
  const isDone = phase === "complete" || phase === "human_intervention";
  const kind = config.work_source?.kind ?? "single";
  const isComplete = phase === "complete" && !["audit", "backlog"].includes(kind);
  // A state of its own: where it cannot be saved, the old one counts the failure.
  const saved: LoopState = {
    ...state,
    score_history: [...state.score_history, verdict.score].slice(-window),
    pass_history: [...state.pass_history ?? [], verdict.pass === true].slice(-window),
    last_verdict: verdict,
    iteration_count: state.iteration_count + 1,
    last_tick_at: new Date().toISOString(),
    current_task: isDone ? null : tick.task.name,
    consecutive_failures: 0,
    not_before: null,
    status: isComplete ? "complete" : state.status,
  };
  saveState(join(tick.dir, ".state.loop"), saved);
  Object.assign(state, saved);
  Object.assign(tick.summary, {
    next_phase: phase,
    iteration_count: state.iteration_count,
    status: state.status,
    halt_reason: state.halt_reason,
  });
  logSafely(tick, "INFO", "TICK", {
    tick: tick.number,
    task: tick.task.name,
    phase: tick.task.phase,
    next_phase: phase,
    verdict,
    iteration_count: state.iteration_count,
    resumed_count: state.resumed_count,
    durations_ms: tick.summary.durations_ms,
  });
  if (state.status === "complete") {
    logSafely(tick, "INFO", "COMPLETE", { iteration_count: state.iteration_count });
  }
}

/** What follows a tick's save; whatever becomes of it, the tick is done. */
async function finishTick(tick: Tick): Promise<void> {
  try {
    if (tick.state.status === "complete") await runCompletionHook(tick);
    removeOldOutputs(tick);
  } catch (error) {
    warn(tick, errorMessage(error));
  }
}

function removeOutputs({ dir }: OpenLoop, isUnwanted: (tick: number) => boolean): void {
  const folder = join(dir, "outputs");
  ensureDirSync(folder);
  for (const { name } of [...Deno.readDirSync(folder)]) {
    if (!isUnwanted(Number(/^tick(\d+)-/.exec(name)?.[1] ?? NaN))) continue;
    Deno.removeSync(join(folder, name), { recursive: true });
  }
}

/** Removes the outputs of all but the last ticks. */
function removeOldOutputs(tick: Tick): void {
  const retention = tick.config.outputs?.retention ?? DEFAULT_RETENTION;
  if (retention < 0) warn(tick, `outputs.retention is ${retention}: taken as 0, which keeps all`);
  if (retention <= 0) return;
  try {
    removeOutputs(tick, (number) => number <= tick.number - retention);
  } catch (error) {
    warn(tick, `old outputs cannot be removed: ${errorMessage(error)}`);
  }
}

/** Removes what an earlier try at this tick left, so that nothing stale is taken for its result. */
function removeStaleOutputs(tick: OpenLoop): void {
  removeOutputs(tick, (number) => number === tick.number);
}

/** Prints what each role would be run with, and starts none. */
function printDryRun(tick: Tick): void {
  for (const role of ROLES) {
    if (role === "orchestrate" && !tick.config.roles?.orchestrate) {
      console.log("orchestrate: built in, no harness");
      continue;
    }
    const promptPath = writePrompt(tick, role, { "{verdict_nonce}": tick.verdictNonce });
    const { argv, timeoutMs, stdin } = buildRequest(tick, role, promptPath);
    tick.summary.artifacts[`${role}_prompt`] = promptPath;
    const timeout = timeoutMs === 0 ? "none" : formatSeconds(timeoutMs);
    console.log(
      `${role}:\n  argv: ${
        JSON.stringify(argv)
      }\n  cwd: ${tick.cwd}\n  timeout: ${timeout}\n  stdin: ${
        stdin === null ? "closed" : "the prompt"
      }\n  prompt: ${promptPath}`,
    );
  }
}

async function timed<T>(summary: Summary, step: StepName, work: () => Promise<T>): Promise<T> {
  const startedAt = performance.now();
  try {
    return await work();
  } finally {
    summary.durations_ms[step] += Math.round(performance.now() - startedAt);
  }
}

/** The steps of a tick whose lock is held, whose state and configuration are read. */
async function runSteps(loop: OpenLoop): Promise<void> {
  const { summary } = loop;
  const task = await timed(summary, "work", () => findWork(loop));
  Object.assign(summary, { task: task.name, phase: task.phase, next_phase: task.phase });
  if (!loop.isDryRun) removeStaleOutputs(loop);
  const folder = await timed(summary, "work", () => prepareWorkFolder(loop));
  const windowTokens = await timed(summary, "context", () => measureWindow(loop));
  const tick: Tick = { ...loop, ...folder, task, windowTokens, verdictNonce: crypto.randomUUID() };
  if (tick.isDryRun) return printDryRun(tick);
  try {
    const { report, diff } = await implement(tick);
    const checks = await timed(summary, "checks", () => runChecks(tick));
    const verdict = await verify(tick, { report, diff, checks });
    await orchestrate(tick, verdict);
    await commitWork(tick, verdict);
    await saveTick(tick, verdict);
  } catch (error) {
    // What fails once the process was told to end, failed by that.
    if (tick.stop.signal !== null) throw error;
    const isPlanned = [SkipError, HaltError, StoppedError].some((kind) => error instanceof kind);
    if (error instanceof BackoffError) noteBackoff(tick, error);
    else if (error instanceof HarnessFailure || !isPlanned) {
      await countFailure(tick, errorMessage(error));
    }
    throw error;
  }
  await finishTick(tick);
}

/** Notes a rate limit in a save of its own. */
function noteBackoff({ dir, state }: Tick, { notBefore }: BackoffError): void {
  state.not_before = notBefore;
  saveState(join(dir, ".state.loop"), state);
}

/** Counts a failed harness in a save of its own; too many in a row halt the loop. */
async function countFailure(tick: Tick, message: string): Promise<void> {
  const { state, config } = tick;
  state.consecutive_failures = (state.consecutive_failures ?? 0) + 1;
  saveState(join(tick.dir, ".state.loop"), state);
  const allowed = config.brakes?.max_consecutive_failures ?? LOOP_DEFAULTS.maxConsecutiveFailures;
  if (state.consecutive_failures < allowed) return;
  await halt(
    tick,
    "human_intervention",
    `${state.consecutive_failures} failures in a row, the last: ${message}`,
  );
}

/** Has the loop halted by status, where a halt's state, log, schedule and hooks have their home. */
async function halt(tick: Wake, reason: HaltReason, detail: string): Promise<void> {
  const line = truncateText(toOneLine(detail), 1900);
  const args = [`--halt-loop=${tick.loop}`, `--reason=${reason}`, `--detail=${line}`];
  const { json, code, problem } = await runProgram(tick, "status", args, true);
  if (code !== 0 || json === null) {
    tick.summary.warnings.push(`Cannot halt loop "${tick.loop}": ${problem}`);
    return;
  }
  Object.assign(tick.summary, { status: "halted", halt_reason: json.halt_reason });
}

/** Turns whatever ended a tick early into its summary. */
async function endEarly(wake: Wake, error: unknown): Promise<void> {
  const { summary } = wake;
  const skip = (reason: SkipReason, ok: boolean) =>
    Object.assign(summary, { ok, skipped: true, reason, message: errorMessage(error) });
  const { signal } = wake.stop;
  if (error instanceof StoppedError || (signal !== null && !(error instanceof HaltError))) {
    // What failed once the process was told to end, failed by that: a terminal tells its children too.
    const message = signal === null ? errorMessage(error) : `ended by ${signal}`;
    Object.assign(summary, { ok: false, message });
    return logSafely(wake, "INFO", "TICK_STOPPED", { tick: summary.tick, message });
  }
  if (error instanceof SkipError) {
    skip(error.reason, !FAILURES.includes(error.reason));
  } else if (error instanceof HaltError) {
    await halt(wake, error.haltReason, error.message);
    skip(error.skip ?? "halted", false);
    summary.skipped = error.skip !== null;
  } else {
    skip("gate_failed", false);
  }
  const state = readStateOrNull(wake.dir);
  if (state !== null) {
    Object.assign(summary, {
      iteration_count: state.iteration_count,
      status: state.status,
      halt_reason: state.halt_reason,
    });
  }
  const { reason, message } = summary;
  logOnce(wake, "INFO", "TICK_SKIPPED", { reason, message });
}

function readStateOrNull(dir: string): LoopState | null {
  const path = join(dir, ".state.loop");
  try {
    return parseLoopState(readTextIfPresent(path) ?? "", path);
  } catch {
    return null; // Damaged: the gate deals with it, and what it did is in the message.
  }
}

/** What a tick is told by its command line. */
export interface TickOptions {
  readonly framework: string;
  readonly project: string;
  readonly loop: string;
  readonly isDryRun: boolean;
  readonly stop: StopSignal;
  /** Present where a schedule wakes the loop more often than it ticks. */
  readonly due?: DueCheck;
}

function makeSummary({ loop, project }: TickOptions): Summary {
  return {
    loop,
    project,
    tick: null,
    ok: true,
    skipped: false,
    reason: null,
    message: null,
    task: null,
    phase: null,
    next_phase: null,
    verdict: null,
    checks: [],
    cost_usd: null,
    iteration_count: null,
    status: null,
    halt_reason: null,
    artifacts: {},
    durations_ms: Object.fromEntries(STEPS.map((step) => [step, 0])) as Record<StepName, number>,
    warnings: [],
  };
}

/** Runs one tick. Never throws: every path ends in a summary. */
export async function runTick(options: TickOptions): Promise<Summary> {
  const summary = makeSummary(options);
  const startedAt = performance.now();
  const dir = join(options.project, ".automaton", "loops", options.loop);
  const skip = (reason: SkipReason, ok: boolean, message: string) =>
    Object.assign(summary, { ok, skipped: true, reason, message });
  try {
    if (!existsSync(join(dir, ".state.loop"))) {
      skip(
        "untracked",
        true,
        `loop ${options.loop} has no .state.loop; status --create-loop ${options.loop} makes one`,
      );
      return summary;
    }
    const slot = findOwnSlot(dir, options.due);
    if (slot === null) {
      skip("not_due", true, "the interval since the last tick is not over yet");
      return summary;
    }
    const lockPath = join(dir, ".state.lock");
    const isLockless = options.isDryRun && !existsSync(lockPath);
    const lock = isLockless ? null : await acquireLock(lockPath, 0);
    if (lock === null && !isLockless) {
      skip("tick_in_progress", true, describeRunningTick(dir));
      return summary;
    }
    try {
      if (!options.isDryRun) rotateScheduleLog(dir);
      const { framework, project, loop, isDryRun, stop } = options;
      const where = { framework, project, loop, dir, isDryRun, stop, lock, summary };
      const [runId, startedAt] = [crypto.randomUUID(), new Date().toISOString()];
      await runLockedTick({ ...where, runId, startedAt }, slot);
      // A tick that was told to end is due again at the next wake, as after a crash.
      if (!isDryRun && stop.signal === null) noteSlot(dir, slot);
    } finally {
      lock?.close();
    }
  } catch (error) {
    skip("gate_failed", false, errorMessage(error));
  } finally {
    summary.durations_ms.total = Math.round(performance.now() - startedAt);
  }
  return summary;
}

/** The slot of this wake as a time; null when it is not due, undefined where nothing has to be checked. */
function findOwnSlot(dir: string, due: DueCheck | undefined): string | null | undefined {
  if (due === undefined) return undefined;
  const lastSlot = readStateOrNull(dir)?.last_slot ?? null;
  const nowMs = Date.now();
  const slotMs = findDueSlot(due, {
    nowMs,
    lastSlotMs: lastSlot === null ? null : Date.parse(lastSlot),
    zoneOffsetMs: -new Date(nowMs).getTimezoneOffset() * 60_000,
  });
  return slotMs === null ? null : new Date(slotMs).toISOString();
}

/** Notes the slot of a tick that ended without its one save, or it would be due again at each wake. */
function noteSlot(dir: string, slot: string | undefined): void {
  if (slot === undefined) return;
  const state = readStateOrNull(dir);
  if (state === null || state.last_slot === slot) return;
  saveState(join(dir, ".state.loop"), { ...state, last_slot: slot });
}

/** The log that cron and launchd write of what ticks print is kept as short as the loop's own. */
function rotateScheduleLog(dir: string): void {
  const path = join(dir, "schedule.log");
  try {
    if (Deno.lstatSync(path).size > LOG_LIMIT_BYTES) rotateLog(path);
  } catch (error) {
    if (!(error instanceof Deno.errors.NotFound)) throw error;
  }
}

function describeRunningTick(dir: string): string {
  const note = readLockNote(join(dir, ".state.lock"));
  return note === null || note.run_id === null
    ? "another command holds the loop"
    : `process ${note.pid} is in a tick since ${note.started_at}`;
}

async function runLockedTick(wake: Wake, slot: string | undefined): Promise<void> {
  const { dir, runId, summary, isDryRun } = wake;
  if (!isDryRun) {
    await sweepLastRun(dir, summary);
    removeScratch(dir);
  }
  writeLockNote(wake, runId);
  try {
    await timed(summary, "gate", () => passGate(wake));
    await runSteps(openLoop(wake, slot));
  } catch (error) {
    await endEarly(wake, error);
  } finally {
    writeLockNote(wake, null);
  }
}

/** Reads a loop's state and settings, which the gate has found to be sound. */
function openLoop(wake: Wake, slot: string | undefined): OpenLoop {
  const { dir, summary } = wake;
  const statePath = join(dir, ".state.loop");
  const state = parseLoopState(Deno.readTextFileSync(statePath), statePath);
  if (slot !== undefined) state.last_slot = slot;
  const configPath = join(dir, "loop.json");
  const { config, warnings } = parseLoopConfig(Deno.readTextFileSync(configPath), configPath);
  const models = readModels(wake.project, wake.framework);
  const loop = { ...wake, config, models, state, number: state.iteration_count + 1 };
  const { iteration_count, status, halt_reason } = state;
  Object.assign(summary, { tick: loop.number, iteration_count, status, halt_reason });
  for (const warning of warnings) warn(loop, warning);
  return loop;
}

/** One line that says what a tick did, or why it did nothing. */
export function renderSummary(summary: Summary): string {
  const { loop, tick, task, verdict, phase, next_phase: next, reason } = summary;
  const message = summary.message === null ? null : toOneLine(summary.message);
  if (reason !== null) {
    return `${loop}: ${summary.skipped ? "skipped" : "ended"} (${reason}): ${message}`;
  }
  if (verdict === null) return `${loop}: ${message ?? "nothing was run"}`;
  const step = phase === next ? `stays in ${phase}` : `${phase} -> ${next}`;
  const cost = summary.cost_usd === null ? "" : `, ${summary.cost_usd.toFixed(4)} USD`;
  const end = summary.status === "complete" ? "; the loop is complete" : "";
  return `${loop} tick ${tick}: ${task} ${verdict.pass ? "passed" : "failed"}, score ${
    verdict.score.toFixed(2)
  }, ${step}${cost}${end}`;
}

// --- Daemon ---

interface DaemonOptions extends TickOptions {
  readonly intervalS: number | undefined;
  readonly maxTicks: number;
}

/** Ticks at an interval until a signal, the number of ticks or the loop's completion ends it. */
async function runDaemon(
  options: DaemonOptions,
): Promise<{ ticks: number; endedBy: string; last: Summary | null }> {
  const dir = join(options.project, ".automaton", "loops", options.loop);
  const intervalMs = (options.intervalS ?? readInterval(dir)) * 1000;
  const { stop } = options;
  let last: Summary | null = null;
  let ticks = 0;
  let endedBy = "max_iterations";
  while (ticks < options.maxTicks && stop.signal === null) {
    if (ticks > 0) await sleepUnlessStopped(intervalMs, stop);
    if (stop.signal !== null) break;
    last = await runTick(options);
    ticks++;
    for (const warning of last.warnings) console.error(`warning: ${toOneLine(warning)}`);
    console.error(renderSummary(last));
    if (last.status === "complete" || last.reason === "complete") {
      endedBy = "complete";
      break;
    }
  }
  if (stop.signal !== null) endedBy = stop.signal;
  if (isDirectory(dir)) {
    logSafely(
      { dir, summary: makeSummary(options), isDryRun: options.isDryRun },
      "INFO",
      "DAEMON_STOPPED",
      { ended_by: endedBy, ticks },
    );
  }
  return { ticks, endedBy, last };
}

function readInterval(dir: string): number {
  const path = join(dir, "loop.json");
  try {
    const { config } = parseLoopConfig(readTextIfPresent(path) ?? "", path);
    return config.schedule?.interval_seconds ?? LOOP_DEFAULTS.intervalSeconds;
  } catch {
    return LOOP_DEFAULTS.intervalSeconds; // The tick itself says what is wrong with loop.json.
  }
}

/** Sleeps in one go; a signal ends it. */
async function sleepUnlessStopped(milliseconds: number, stop: StopSignal): Promise<void> {
  // A longer timer would fire at once.
  for (let left = milliseconds; left > 0 && stop.signal === null; left -= MAX_TIMER_MS) {
    await sleepOnce(Math.min(left, MAX_TIMER_MS), stop);
  }
}

function sleepOnce(milliseconds: number, stop: StopSignal): Promise<void> {
  return new Promise((wake) => {
    const end = () => {
      clearTimeout(timer);
      stop.wake.delete(end);
      wake();
    };
    const timer = setTimeout(end, milliseconds);
    stop.wake.add(end);
  });
}

/** Takes what a schedule says about its wakes out of the environment, where agents would inherit it. */
function takeDueCheck(): { due?: DueCheck } {
  const names = ["AUTOMATON_DUE_INTERVAL_S", "AUTOMATON_DUE_PERIOD_S"];
  const [intervalS, periodS] = names.map((name) => Number(readEnv(name) ?? NaN));
  for (const name of names) Deno.env.delete(name);
  if (!(intervalS! > 0 && periodS! > 0)) return {};
  return { due: { intervalMs: intervalS! * 1000, periodMs: periodS! * 1000 } };
}

/** True where nohup has this process ignore SIGHUP: what it starts does so too, and lives through one. */
function isHangupIgnored(): boolean {
  const args = ["-c", "kill -s HUP $$"];
  try {
    return new Deno.Command("sh", { args, stdin: "null" }).outputSync().signal === null;
  } catch {
    return false; // Nothing can be started: whatever needs to will say so.
  }
}

function listenForSignals(stop: StopSignal): void {
  const isWindows = Deno.build.os === "windows";
  const isHangupHeard = isWindows || !isHangupIgnored();
  for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"] as const) {
    if (isWindows && signal !== "SIGINT") continue;
    Deno.addSignalListener(signal, () => {
      // With its first listener Deno itself would end at HUP: so this one is there to do nothing.
      if (signal === "SIGHUP" && !isHangupHeard) return;
      stop.signal ??= signal;
      for (const wake of [...stop.wake]) wake();
    });
  }
}

// --- Command table ---

/** Options of the program. */
// deno-fmt-ignore -- a table: one row a line.
export const OPTIONS_OF_RUNNER: readonly OptionSpec[] = [
  { name: "mode", value: "MODE", help: "tick (one) or daemon (one after the other)" },
  { name: "loop", value: "NAME", help: "the loop" },
  { name: "project", value: "DIR", help: "the project (default: AUTOMATON_PROJECT, else found from here)" },
  { name: "interval", value: "S", help: "daemon: seconds between ticks (default: the loop's own)" },
  { name: "max-iterations", value: "N", help: "daemon: end after N ticks" },
  { name: "dry-run", help: "show what each role would be run with; start nothing" },
  { name: "json", help: "one line of JSON, the last of stdout" },
  { name: "help", help: "this text" },
  { name: "version", help: "the framework's version" },
];

function renderRunnerHelp(): string {
  return `loop-runner: one tick of a loop, or one after the other

Usage: loop-runner --mode tick --loop NAME [OPTION ...]
       loop-runner --mode daemon --loop NAME [OPTION ...]

${renderOptions(OPTIONS_OF_RUNNER)}`;
}

/** Reads the mode and the loop, both of which every run needs. */
function readTarget(
  given: ReadonlyMap<string, string | true>,
): { mode: "tick" | "daemon"; loop: string } {
  const mode = given.get("mode");
  if (mode === undefined) throw new UsageError('Cannot run without "--mode": give tick or daemon');
  if (mode !== "tick" && mode !== "daemon") {
    throw new UsageError(`Cannot use mode "${mode}": give tick or daemon`);
  }
  const loop = given.get("loop");
  if (loop === undefined) throw new UsageError('Cannot run without "--loop": name the loop');
  if (!NAME_PATTERN.test(`${loop}`)) {
    throw new UsageError(
      `Cannot use loop name "${loop}": it must be 1 to 63 of a-z, 0-9 and -, not starting with -`,
    );
  }
  for (const name of ["interval", "max-iterations"]) {
    if (mode === "tick" && given.has(name)) {
      throw new UsageError(`Cannot use "--${name}" with "--mode tick"`);
    }
  }
  if (mode === "daemon" && given.has("dry-run")) {
    throw new UsageError('Cannot use "--dry-run" with "--mode daemon"');
  }
  return { mode, loop: `${loop}` };
}

// --- Main ---

/** Runs one command line; returns the exit code. */
export async function runLoopRunner(args: readonly string[]): Promise<number> {
  try {
    const given = parseCommandLine(args, OPTIONS_OF_RUNNER);
    const framework = findFrameworkDir(import.meta.url);
    if (given.has("help")) {
      console.log(renderRunnerHelp().trimEnd());
      return 0;
    }
    if (given.has("version")) {
      console.log(`loop-runner ${readVersion(framework)}`);
      return 0;
    }
    const { mode, loop } = readTarget(given);
    const intervalS = readWholeNumber(given, "interval", { min: 1, max: 31_536_000 });
    const maxTicks = readWholeNumber(given, "max-iterations", { min: 1, max: 1_000_000_000 }) ??
      Infinity;
    clearGitEnvironment();
    const due = takeDueCheck();
    const flag = given.get("project");
    const project = findProjectDir(flag === undefined ? undefined : `${flag}`, false);
    const stop: StopSignal = { signal: null, wake: new Set() };
    listenForSignals(stop);
    const options = { framework, project, loop, isDryRun: given.has("dry-run"), stop };
    if (mode === "daemon") {
      const { ticks, endedBy, last } = await runDaemon({ ...options, intervalS, maxTicks });
      if (given.has("json")) {
        console.log(JSON.stringify({ schema_version: 1, loop, ticks, ended_by: endedBy, last }));
      } else console.log(`${loop}: daemon stopped after ${ticks} tick(s) (${endedBy})`);
      return 0;
    }
    const summary = await runTick({ ...options, ...due });
    for (const warning of summary.warnings) console.error(`warning: ${toOneLine(warning)}`);
    if (given.has("json")) console.log(JSON.stringify({ schema_version: 1, ...summary }));
    // A line at each wake that is no tick would fill the schedule's log.
    else if (summary.reason !== "not_due") console.log(renderSummary(summary));
    return stop.signal === null ? 0 : EXIT_CODES[stop.signal];
  } catch (error) {
    return reportFailure(error, "loop-runner", args);
  }
}

if (import.meta.main) Deno.exit(await runLoopRunner(Deno.args));
