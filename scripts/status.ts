#!/usr/bin/env -S deno run -q --no-prompt -P=status
/**
 * The task pipeline, and the only place where its rules are enforced.
 *
 * Tasks move through phases, each with a document to leave behind; a person approves what only a
 * person may approve. Loops have brakes, which `--check-gate` applies before every tick. Commands and
 * options are listed by `--help`, from the tables at the end of this file.
 *
 * Reads and writes below `<project>/.automaton/` alone: `tasks/<task>/.state` with its documents,
 * `loops/<name>/` with `loop.json`, `.state.loop`, `.state.log`, `.state.lock` and `pause.request`,
 * and `models.json`. Reads `config.md` and `templates/loops/` of the framework.
 *
 * Environment: AUTOMATON_HOME (framework), AUTOMATON_PROJECT (project), AUTOMATON_NO_LOOP_LOCK=1 (the
 * caller holds the loop's lock), and what a tick gives its harness: AUTOMATON_LOOP, AUTOMATON_ROLE,
 * AUTOMATON_TASK, AUTOMATON_OP_FILE, from which the role guard decides.
 *
 * Permissions: read and write (a project may lie anywhere), run (git), env (the names above), sys
 * (none but the host's name). No network.
 *
 * Exit codes: 0 done, or a gate that says no; 1 refused or failed; 2 usage.
 *
 * @module
 */

import { parseArgs } from "@std/cli";
import { ensureDirSync, existsSync } from "@std/fs";
import { parse as parseJsonc } from "@std/jsonc";
import { basename, dirname, fromFileUrl, isAbsolute, join, relative, resolve } from "@std/path";

// --- Constants ---

/** The phases of a task, in order; a task also may wait in WAITING_PHASE. */
export const PHASES = [
  "research",
  "design",
  "spec",
  "implement",
  "code_review",
  "bug_hunt",
  "complete",
] as const;

/** Where a task waits for a person. */
export const WAITING_PHASE = "human_intervention";

/** The document that each phase leaves in the task's folder. */
export const PHASE_DOCUMENTS: Readonly<Record<string, string>> = {
  research: "RESEARCH.md",
  design: "DESIGN.md",
  spec: "SPEC.md",
  implement: "IMPLEMENTATION.md",
  code_review: "CODE_REVIEW.md",
  bug_hunt: "BUG_REPORT.md",
};

const EPOCH = "1970-01-01T00:00:00Z";
const DEFAULT_LOCK_TIMEOUT_S = 10;
const DEFAULT_STALLED_DAYS = 7;
const DEFAULT_LOG_LINES = 20;
const DAY_MS = 86_400_000;

// --- Types ---

/** One step in a task's history. */
export interface TaskStep {
  readonly at: string;
  readonly from: string | null;
  readonly to: string;
  readonly by: string;
  readonly reason: string | null;
}

/** A task's `.state`; unknown fields are kept. */
export interface TaskState {
  schema_version: 1;
  name: string;
  title: string;
  phase: string;
  previous_phase: string | null;
  created_at: string;
  updated_at: string;
  approved_at: string | null;
  claimed_by: string | null;
  loop: string | null;
  history: TaskStep[];
  [unknownField: string]: unknown;
}

/** One finding of the audit. */
export interface Violation {
  readonly category: 1 | 2 | 3 | 4 | 5 | 6;
  readonly severity: "high" | "med" | "low";
  readonly task: string | null;
  /** The loop that the finding is about, where it is about one. */
  readonly loop: string | null;
  readonly message: string;
  readonly resolved: false;
}

/** A brake that says no: why the loop is to be halted. */
export interface GateTrip {
  readonly haltReason: HaltReason;
  readonly detail: string;
}

/** What a command was given. */
interface Invocation {
  readonly given: ReadonlyMap<string, string | true>;
  readonly framework: string;
  readonly project: string;
}

/** What a command answers: one object for `--json`, else text; a hint where the answer is no. */
interface Answer {
  readonly json: Readonly<Record<string, unknown>>;
  readonly text: string;
  readonly hint?: string;
  readonly exitCode?: 0 | 1;
}

/** One command of the table: its flag, what goes with it, whether it writes. */
interface Command extends OptionSpec {
  readonly group: "Tasks" | "Loops";
  /** Options that the command takes, besides those that all take. */
  readonly takes: readonly string[];
  /** Of those, the ones without which it cannot run. */
  readonly needs?: readonly string[];
  readonly writes: boolean;
  /** True where the command makes `.automaton/` in a project named outright. */
  readonly creates?: true;
  readonly run: (invocation: Invocation) => Answer | Promise<Answer>;
}

/** A loop's folder as others may look at it without its lock. */
type LoopView =
  | { readonly name: string; readonly dir: string; readonly state: LoopState }
  | { readonly name: string; readonly dir: string; readonly state: null; readonly problem: string };

// --- Errors ---

/** A state file that cannot be read and has no usable copy. */
class StateLostError extends Error {
  override name = "StateLostError";
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

/** Returns the candidate closest to a word, or null when none is within half of its length. */
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
 */
export function parseCommandLine(
  args: readonly string[],
  options: readonly OptionSpec[],
): Map<string, string | true> {
  const valued = options.filter((option) => option.value !== undefined).map((o) => o.name);
  const switches = options.filter((option) => option.value === undefined).map((o) => o.name);
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

/** Reads an option's value as a whole number within bounds; undefined when it was not given. */
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

/** Lays out option lines for `--help`: flag and placeholder, then what it does. */
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
  const words = (error instanceof Error ? error.message : `${error}`).replaceAll("\n", " ");
  const message = words.startsWith("Cannot ") ? words : `Cannot go on: ${words}`;
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
    if (mayCreate || isDirectory(join(path, ".automaton"))) return path;
    throw new RefusedError(
      `Cannot open project "${path}": it holds no .automaton folder`,
      "status --create-task NAME --project DIR makes one",
    );
  }
  for (let path = Deno.cwd();; path = dirname(path)) {
    if (isDirectory(join(path, ".automaton"))) return path;
    if (dirname(path) === path) break;
  }
  throw new RefusedError(
    `Cannot find a project from "${Deno.cwd()}": no folder above it holds .automaton`,
    "name it with --project DIR",
  );
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

/** A file's text, or null when there is no such file. */
export function readTextIfPresent(path: string): string | null {
  try {
    return Deno.readTextFileSync(path);
  } catch (error) {
    if (error instanceof Deno.errors.NotFound || error instanceof Deno.errors.NotADirectory) {
      return null;
    }
    throw error;
  }
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

/** True for a JSON object: not null, not an array. */
export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** Shortens any value to what fits in one line of an error message. */
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

/** Parses JSON (or JSONC by `parse`) and says where it came from when it does not parse. */
export function parseJsonText(
  text: string,
  where: string,
  parse: (text: string) => unknown = JSON.parse,
): unknown {
  try {
    return parse(text.replace(/^\uFEFF/, ""));
  } catch (error) {
    const detail = text.trim() === "" ? "it is empty" : (error as Error).message;
    throw new SyntaxError(`Cannot parse "${where}": ${detail}`);
  }
}
// #endregion shared:fields

// #region shared:models
/** One model of models.json. */
export interface ModelEntry {
  readonly context_tokens?: number;
  readonly local?: boolean;
  readonly gguf?: string;
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
  const temporary = join(dirname(path), `.${basename(path)}.tmp-${Deno.pid}`);
  try {
    const file = Deno.openSync(temporary, { write: true, create: true, truncate: true });
    try {
      const bytes = new TextEncoder().encode(text);
      for (let done = 0; done < bytes.length;) done += file.writeSync(bytes.subarray(done));
      file.syncSync();
    } finally {
      file.close();
    }
    Deno.renameSync(temporary, path);
  } catch (error) {
    try {
      Deno.removeSync(temporary);
    } catch {
      // Nothing was left behind; the first error is the one to tell.
    }
    throw error;
  }
  syncDirectory(dirname(path));
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
  const text = `${JSON.stringify(state, null, 2)}\n`;
  writeFileAtomic(`${path}.bak`, text);
  writeFileAtomic(path, text);
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
  const deadline = Date.now() + timeoutMs;
  while (true) {
    const file = Deno.openSync(path, { read: true, write: true, create: true });
    const isOurs = await tryLock(file, Math.max(0, deadline - Date.now()));
    if (isOurs && isSameFile(file, path)) return file;
    if (isOurs !== null) file.close();
    if (isOurs !== true) {
      if (Date.now() >= deadline) return null;
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

/** Throws unless a state file's `schema_version` is the one that this edition reads and writes. */
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
 */
export function parseLoopState(text: string, where: string): LoopState {
  const parsed = parseJsonText(text, where);
  checkSchemaVersion(parsed, where);
  checkFields(parsed, LOOP_STATE_RULES, where);
  return parsed as unknown as LoopState;
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
}

/** The roles of a tick, in order. */
export type RoleName = "implement" | "verify" | "orchestrate";

/** Where a harness's JSON output says what a run cost; each field but the first is a dotted path. */
export interface UsageConfig {
  /** Read the last JSON line alone, or every JSON line and add the numbers up. */
  readonly combine?: "last" | "sum";
  readonly cost_usd?: string;
  readonly input_tokens?: string;
  readonly output_tokens?: string;
  /** The answer's text, which then is what a verdict is looked for in. */
  readonly text?: string;
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
  readonly hooks?: Readonly<Record<string, unknown>>;
  readonly allowed_phases?: readonly string[];
}

/** Defaults of the fields that more than one program reads. */
export const LOOP_DEFAULTS = {
  maxIterations: 10,
  plateauWindow: 3,
  maxConsecutiveFailures: 3,
  intervalSeconds: 3600,
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
  ["brakes", "an object", isRecord],
  ["brakes.max_iterations", "a whole number from 1", isIntegerFrom(1)],
  ["brakes.max_budget_usd", "a number from 0 or null", (v) => v === null || isNumberFrom(0)(v)],
  ["brakes.score_plateau_window", "a whole number from 2", isIntegerFrom(2)],
  ["brakes.max_consecutive_failures", "a whole number from 1", isIntegerFrom(1)],
  ["blast_radius", "an object", isRecord],
  ["blast_radius.worktree", "true or false", (v) => typeof v === "boolean"],
  ["blast_radius.file_scope", "a list of paths inside the project, without ..", isListOf(isScopePath)],
  ["blast_radius.base", "a branch", (v) => typeof v === "string" && /^[^-]/.test(v)],
  ["blast_radius.commit", "on_pass, always or never", isOneOf(["on_pass", "always", "never"])],
  ["checks", "a list of commands, each a list of texts", isListOf(isArgv)],
  ["acceptance_criteria", "a text or a list of texts", (v) => isText(v) || isListOf(isText)(v)],
  ["harness", "an object", isRecord],
  ["harness.command", "a list of texts, the first not empty", isArgv],
  ["harness.prompt_var", "a token", (v) => isText(v) && v !== ""],
  ["harness.cwd_var", "a token", (v) => isText(v) && v !== ""],
  ["harness.output_var", "a token", (v) => isText(v) && v !== ""],
  ["harness.stdin", "none or prompt", isOneOf(["none", "prompt"])],
  ["harness.timeout_seconds", "a number from 0", isNumberFrom(0)],
  ["harness.idle_timeout_seconds", "a number from 0", isNumberFrom(0)],
  ["harness.env", "an object of texts", (v) => isRecord(v) && Object.keys(v).every(isEnvName) && Object.values(v).every(isText)],
  ["harness.unset_env", "a list of names", isListOf(isEnvName)],
  ["harness.backoff", "an object", isRecord],
  ["harness.backoff.patterns", "a list of regular expressions", isListOf(isPattern)],
  ["harness.backoff.exit_codes", "a list of whole numbers", isListOf((v) => Number.isSafeInteger(v))],
  ["harness.backoff.seconds", "a number from 1", isNumberFrom(1)],
  ["harness.usage", "an object", isRecord],
  ["harness.usage.combine", "last or sum", isOneOf(["last", "sum"])],
  ["harness.usage.cost_usd", "a dotted path", (v) => isText(v) && v !== ""],
  ["harness.usage.input_tokens", "a dotted path", (v) => isText(v) && v !== ""],
  ["harness.usage.output_tokens", "a dotted path", (v) => isText(v) && v !== ""],
  ["harness.usage.text", "a dotted path", (v) => isText(v) && v !== ""],
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
const OPEN_FIELDS = ["harness.env"];

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
    if ((Deno.lstatSync(path).size ?? 0) + line.length > LOG_LIMIT_BYTES) rotateLog(path);
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

/**
 * Runs a command without a shell and with a deadline.
 *
 * @returns code null with the reason in stderr when it could not start or was killed at the deadline.
 */
export async function runCommand(
  argv: readonly string[],
  options: { cwd?: string; env?: Record<string, string>; timeoutMs?: number } = {},
): Promise<CommandOutcome> {
  const { timeoutMs = 60_000, ...spawnOptions } = options;
  let child: Deno.ChildProcess;
  try {
    child = new Deno.Command(argv[0]!, {
      args: argv.slice(1),
      ...spawnOptions,
      stdin: "null",
      stdout: "piped",
      stderr: "piped",
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
  child.kill("SIGKILL");
  const stderr = `no answer from ${argv[0]} within ${timeoutMs / 1000} s`;
  return { code: null, stdout: new Uint8Array(), stderr };
}

/** Runs git in a folder: no pager, no prompt, no lock taken only to refresh, no file monitor. */
export function runGit(
  cwd: string,
  args: readonly string[],
  options: { env?: Record<string, string>; timeoutMs?: number } = {},
): Promise<CommandOutcome> {
  const fixed = ["--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotepath=false"];
  const env = { GIT_TERMINAL_PROMPT: "0", LC_ALL: "C", ...options.env };
  return runCommand(["git", ...fixed, ...args], { cwd, ...options, env });
}
// #endregion shared:process

// --- Helpers ---

/** The phase after one, or null after the last and for phases out of the pipeline. */
export function nextPhase(phase: string): string | null {
  const index = (PHASES as readonly string[]).indexOf(phase);
  return index < 0 ? null : PHASES[index + 1] ?? null;
}

function isKnownPhase(phase: string): boolean {
  return phase === WAITING_PHASE || (PHASES as readonly string[]).includes(phase);
}

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
    const allowed = entry.replaceAll("\\", "/").replace(/^(\.\/)+/, "").replace(/\/+$/, "");
    return allowed === "" || allowed === "." || path === allowed || path.startsWith(`${allowed}/`);
  });
}

/**
 * True when scores are flat or only falling over a whole window and none of those ticks passed.
 *
 * @param passes Beside the scores; an absent entry counts as not passed.
 */
export function isPlateau(
  scores: readonly number[],
  passes: readonly boolean[],
  window: number,
): boolean {
  if (scores.length < window) return false;
  const recent = scores.slice(-window);
  const hasRisen = recent.some((score, index) => index > 0 && score > recent[index - 1]!);
  return !hasRisen && !passes.slice(-window).includes(true);
}

/** Splits git's NUL-separated output; file names may hold anything else, newlines too. */
function splitNul(bytes: Uint8Array): string[] {
  return new TextDecoder().decode(bytes).split("\0").filter((item) => item !== "");
}

function countWords(count: number, word: string): string {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** Who acts: a person, or a loop and the role in it. */
function describeActor(): string {
  const loop = readEnv("AUTOMATON_LOOP");
  const role = readEnv("AUTOMATON_ROLE");
  if (loop === undefined && role === undefined) return "person";
  return `loop:${loop ?? "?"}${role === undefined ? "" : `/${role}`}`;
}

/** How long ago something was, in the largest fitting unit. */
export function describeAge(milliseconds: number): string {
  const minutes = Math.floor(milliseconds / 60_000);
  if (minutes < 1) return "just now";
  if (minutes < 120) return `${minutes} min ago`;
  if (minutes < 2 * 24 * 60) return `${Math.floor(minutes / 60)} h ago`;
  return `${Math.floor(minutes / (24 * 60))} days ago`;
}

/** Lays out rows as columns as wide as their widest cell. */
export function renderTable(rows: readonly (readonly string[])[]): string {
  const widths: number[] = [];
  for (const row of rows) {
    row.forEach((cell, index) => widths[index] = Math.max(widths[index] ?? 0, cell.length));
  }
  return rows.map((row) =>
    row.map((cell, i) => cell.padEnd(widths[i]!)).join("  ").trimEnd() + "\n"
  )
    .join("");
}

// --- Parsing ---

// deno-fmt-ignore -- a table: one row a line.
const TASK_STATE_RULES: readonly FieldRule[] = [
  ["name", "a task's name", isText, "required"],
  ["title", "a text", isText, "required"],
  ["phase", "a phase", isText, "required"],
  ["previous_phase", "a phase or null", isTextOrNull, "required"],
  ["created_at", "a time", isText, "required"],
  ["updated_at", "a time", isText, "required"],
  ["approved_at", "a time or null", isTextOrNull, "required"],
  ["claimed_by", "a session or null", isTextOrNull, "required"],
  ["loop", "a loop's name or null", isNameOrNull, "required"],
  ["history", "a list of steps, each with at, from, to, by and reason", isListOf((step) => isRecord(step) && isText(step.to) && isTextOrNull(step.from)), "required"],
];

/**
 * Parses the text of a task's `.state`. An unknown phase is a finding of the audit, not an error here.
 *
 * @throws {SyntaxError|TypeError|NewerSchemaError} Names the file and the field.
 */
export function parseTaskState(text: string, where: string): TaskState {
  const parsed = parseJsonText(text, where);
  checkSchemaVersion(parsed, where);
  checkFields(parsed, TASK_STATE_RULES, where);
  return parsed as unknown as TaskState;
}

/** What contradicts itself in a task's history; null when it is possible. */
export function findImpossibleHistory(task: TaskState): string | null {
  let at: string | null = null;
  for (const step of task.history) {
    if (step.from !== at) return `a step leaves ${step.from} where the task was in ${at}`;
    if (!isKnownPhase(step.to)) return `a step leads to the unknown phase "${step.to}"`;
    const isForward = step.from !== null && isKnownPhase(step.from) &&
      step.from !== WAITING_PHASE &&
      step.to !== WAITING_PHASE &&
      PHASES.indexOf(step.to as never) > PHASES.indexOf(step.from as never);
    if (isForward && nextPhase(step.from!) !== step.to) {
      return `a step leaps from ${step.from} to ${step.to}`;
    }
    at = step.to;
  }
  if (task.history.length > 0 && at !== task.phase) {
    return `its history ends in ${at}, not ${task.phase}`;
  }
  const index = PHASES.indexOf(task.phase as never);
  if (index >= PHASES.indexOf("implement") && task.approved_at === null) {
    return `it is in ${task.phase} without a person's approval`;
  }
  return null;
}

/** The phases that a task has behind it, from the one it was created in. */
function listPhasesBehind(task: TaskState): string[] {
  const phase = task.phase === WAITING_PHASE ? task.previous_phase ?? "research" : task.phase;
  const created = task.history[0]?.to ?? "research";
  const [start, end] = [created, phase].map((name) => PHASES.indexOf(name as never));
  return start! < 0 || end! < 0 ? [] : PHASES.slice(start, end);
}

// --- Files ---

const automatonDir = (project: string) => join(project, ".automaton");
const tasksDir = (project: string) => join(automatonDir(project), "tasks");
const loopsDir = (project: string) => join(automatonDir(project), "loops");

function checkName(kind: string, name: string): string {
  if (NAME_PATTERN.test(name)) return name;
  throw new UsageError(
    `Cannot use ${kind} name "${name}": it must be 1 to 63 of a-z, 0-9 and -, not starting with -`,
  );
}

/** True when a document is there and holds more than white space. */
function hasDocument(taskDir: string, document: string): boolean {
  try {
    return Deno.statSync(join(taskDir, document)).size > 0 &&
      Deno.readTextFileSync(join(taskDir, document)).trim() !== "";
  } catch {
    return false; // Missing or not a file: there is no document.
  }
}

/**
 * Reads a state file that its caller has locked and is about to change. A damaged one is kept as
 * `<file>.bad-<time>` and its `.bak` takes its place.
 *
 * @throws {RefusedError} Where there is no file, or a newer edition wrote it.
 * @throws {StateLostError} Where neither can be read; nothing was changed.
 */
function loadState<T>(
  path: string,
  parse: (text: string, where: string) => T,
): { state: T; restored: string | null } {
  const text = readTextIfPresent(path);
  if (text === null) throw new RefusedError(`Cannot open "${path}": no such file (untracked)`);
  try {
    return { state: parse(text, path), restored: null };
  } catch (error) {
    if (error instanceof NewerSchemaError) {
      throw new RefusedError(error.message, "update Automaton");
    }
    const problem = (error as Error).message;
    const copy = readTextIfPresent(`${path}.bak`);
    let state: T;
    try {
      state = parse(copy ?? "", `${path}.bak`);
    } catch {
      throw new StateLostError(problem); // The copy's own damage adds nothing to what is to do.
    }
    keepDamaged(path);
    writeFileAtomic(path, copy!);
    return { state, restored: problem };
  }
}

/** Copies a damaged state file aside before anything takes its place. */
function keepDamaged(path: string): void {
  const stamp = new Date().toISOString().replace(/[-:.]/g, "");
  Deno.copyFileSync(path, `${path}.bad-${stamp}`);
}

/** A task's folder, in tasks/ or in tasks/complete/; null when there is none. */
function findTaskDir(project: string, name: string): string | null {
  const candidates = [join(tasksDir(project), name), join(tasksDir(project), "complete", name)];
  if (name === "complete") candidates.shift();
  return candidates.find(isDirectory) ?? null;
}

/** Reads a task without its lock. */
function readTask(project: string, name: string): { dir: string; task: TaskState } {
  checkName("task", name);
  const dir = findTaskDir(project, name);
  if (dir === null) {
    throw new RefusedError(
      `Cannot open task "${name}": there is none in ${tasksDir(project)}`,
      `status --create-task ${name}`,
    );
  }
  const path = join(dir, ".state");
  const text = readTextIfPresent(path);
  if (text === null) {
    throw new RefusedError(
      `Cannot use task "${name}": it has no .state (untracked)`,
      `move ${dir} aside, run status --create-task ${name}, and move its documents back`,
    );
  }
  return { dir, task: parseTaskState(text, path) };
}

/**
 * Changes a task under its own lock.
 *
 * @param change Alters the state it is given, or throws; nothing is saved then.
 */
async function updateTask(
  project: string,
  name: string,
  change: (task: TaskState, dir: string) => void,
): Promise<{ dir: string; task: TaskState }> {
  const { dir } = readTaskDir(project, name);
  const lock = await acquireLock(join(dir, ".state.lock"), DEFAULT_LOCK_TIMEOUT_S * 1000);
  if (lock === null) throw new RefusedError(`Cannot lock task "${name}": another command holds it`);
  try {
    const path = join(dir, ".state");
    const { state: task, restored } = loadState(path, parseTaskState);
    if (restored !== null) console.error(`warning: ${restored}; restored from ${path}.bak`);
    change(task, dir);
    task.updated_at = new Date().toISOString();
    saveState(path, task);
    return { dir: moveToItsPlace(project, task, dir), task };
  } finally {
    lock.close();
  }
}

/** The folder of a tracked task; its state may be damaged. */
function readTaskDir(project: string, name: string): { dir: string } {
  const dir = findTaskDir(project, checkName("task", name));
  if (dir !== null && existsSync(join(dir, ".state"))) return { dir };
  return readTask(project, name);
}

/** Finished tasks live in tasks/complete/, all others in tasks/. */
function moveToItsPlace(project: string, task: TaskState, dir: string): string {
  const parent = task.phase === "complete"
    ? join(tasksDir(project), "complete")
    : tasksDir(project);
  const place = join(parent, task.name);
  if (resolve(dir) === resolve(place)) return dir;
  ensureDirSync(parent);
  Deno.renameSync(dir, place);
  syncDirectory(parent);
  return place;
}

/** The names of the folders in a folder; none when it is missing. */
function listFolders(path: string): string[] {
  try {
    return [...Deno.readDirSync(path)].filter((entry) => entry.isDirectory).map((e) => e.name)
      .sort();
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return [];
    throw error;
  }
}

/** A loop's folder counts as one when it holds a state or a configuration (not only old logs). */
function isLoopDir(dir: string): boolean {
  return existsSync(join(dir, ".state.loop")) || existsSync(join(dir, "loop.json"));
}

function findLoopDir(project: string, name: string): string {
  const dir = join(loopsDir(project), checkName("loop", name));
  if (isLoopDir(dir)) return dir;
  throw new RefusedError(
    `Cannot open loop "${name}": there is none in ${loopsDir(project)}`,
    `status --create-loop ${name} --from-template TEMPLATE`,
  );
}

/** Looks at a loop without its lock and without repairing anything. */
function viewLoop(project: string, name: string): LoopView {
  const dir = join(loopsDir(project), name);
  try {
    const text = readTextIfPresent(join(dir, ".state.loop"));
    if (text === null) return { name, dir, state: null, problem: "no .state.loop (untracked)" };
    return { name, dir, state: parseLoopState(text, join(dir, ".state.loop")) };
  } catch (error) {
    return { name, dir, state: null, problem: (error as Error).message };
  }
}

function listLoops(project: string): LoopView[] {
  return listFolders(loopsDir(project))
    .filter((name) => NAME_PATTERN.test(name) && isLoopDir(join(loopsDir(project), name)))
    .map((name) => viewLoop(project, name));
}

function readLoopConfig(dir: string): { config: LoopConfig; warnings: string[] } {
  const path = join(dir, "loop.json");
  const text = readTextIfPresent(path);
  if (text === null) throw new RefusedError(`Cannot open "${path}": no such file`);
  return parseLoopConfig(text, path);
}

/** Appends to a loop's log; a log that cannot be written must not stop a brake. */
function logEvent(
  dir: string,
  level: "INFO" | "WARNING" | "ERROR",
  event: string,
  fields: Record<string, unknown> = {},
): void {
  try {
    appendLog(dir, level, event, { by: describeActor(), ...fields });
  } catch (error) {
    console.error(
      `warning: Cannot write "${join(dir, ".state.log")}": ${(error as Error).message}`,
    );
  }
}

/**
 * Runs a change on a loop under its lock, which a tick may have taken for its caller.
 *
 * @throws {RefusedError} When the lock is not free in time: says who holds it and since when.
 */
async function withLoopLock<T>(
  invocation: Invocation,
  name: string,
  change: (dir: string) => T | Promise<T>,
): Promise<T> {
  const dir = findLoopDir(invocation.project, name);
  if (readEnv("AUTOMATON_NO_LOOP_LOCK") === "1") return await change(dir);
  const timeoutS = readWholeNumber(invocation.given, "lock-timeout", { min: 0, max: 86_400 });
  const path = join(dir, ".state.lock");
  const lock = await acquireLock(path, (timeoutS ?? DEFAULT_LOCK_TIMEOUT_S) * 1000);
  if (lock === null) {
    throw new RefusedError(
      `Cannot lock loop "${name}": ${describeHolder(path)}`,
      `wait for the tick to end, or end it with status --pause-loop ${name} --now`,
    );
  }
  try {
    return await change(dir);
  } finally {
    lock.close();
  }
}

function describeHolder(lockPath: string): string {
  const note = readLockNote(lockPath);
  if (note === null) return "another command holds it";
  return `a tick (process ${note.pid} on ${note.host}) holds it since ${note.started_at}`;
}

/** Reads a loop's state to change it; one that is lost halts the loop for a person to look at. */
function loadLoopState(dir: string): LoopState {
  const path = join(dir, ".state.loop");
  try {
    const { state, restored } = loadState(path, parseLoopState);
    if (restored !== null) {
      logEvent(dir, "ERROR", "STATE_RESTORED", { message: restored });
      console.error(`warning: ${restored}; restored from ${path}.bak`);
    }
    return state;
  } catch (error) {
    if (!(error instanceof StateLostError)) throw error;
    keepDamaged(path);
    const state = rebuildLoopState(dir);
    saveState(path, state);
    logEvent(dir, "ERROR", "HALTED", { halt_reason: "human_intervention", detail: error.message });
    console.error(`warning: ${error.message}; the loop is halted for a person to look at`);
    return state;
  }
}

/** A halted state in the place of a lost one; counters go on from the log, never from zero. */
function rebuildLoopState(dir: string): LoopState {
  const state = makeLoopState(basename(dir));
  for (const suffix of [".3", ".2", ".1", ""]) {
    const text = readTextIfPresent(join(dir, `.state.log${suffix}`)) ?? "";
    for (const [, key, digits] of text.matchAll(/"(iteration_count|resumed_count)":(\d{1,9})/g)) {
      const field = key as "iteration_count" | "resumed_count";
      state[field] = Math.max(state[field], Number(digits));
    }
  }
  state.status = "halted";
  state.halt_reason = "human_intervention";
  return state;
}

function makeLoopState(name: string): LoopState {
  return {
    schema_version: 1,
    name,
    status: "running",
    halt_reason: null,
    iteration_count: 0,
    resumed_count: 0,
    last_tick_at: EPOCH,
    last_verdict: null,
    score_history: [],
    current_task: null,
    worktree_branch: null,
    worktree_path: null,
  };
}

/** The real path of a file that need not exist: its nearest existing ancestor's, and the rest. */
function resolveRealPath(path: string): string {
  const rest: string[] = [];
  for (let at = resolve(path);; at = dirname(at)) {
    try {
      return join(Deno.realPathSync(at), ...rest);
    } catch (error) {
      if (isBrokenLink(at)) throw new RefusedError(`Cannot follow "${at}": the link leads nowhere`);
      if (dirname(at) === at) throw error;
      rest.unshift(basename(at));
    }
  }
}

function isBrokenLink(path: string): boolean {
  try {
    return Deno.lstatSync(path).isSymlink;
  } catch {
    return false; // Nothing of that name at all.
  }
}

/** A path below a folder, with `/`; null when it lies elsewhere. */
function pathBelow(folder: string, path: string): string | null {
  const inner = relative(folder, path);
  if (inner === ".." || /^\.\.[/\\]/.test(inner) || isAbsolute(inner)) return null;
  return inner.replaceAll("\\", "/");
}

// --- Git ---

async function readGit(cwd: string, args: readonly string[]): Promise<Uint8Array> {
  const { code, stdout, stderr } = await runGit(cwd, args);
  if (code === 0) return stdout;
  throw new RefusedError(`Cannot run git ${args[0]} in "${cwd}": ${stderr || `exit code ${code}`}`);
}

/** True when a folder is the top of its own git checkout, not merely inside of another. */
async function isCheckout(path: string): Promise<boolean> {
  if (!isDirectory(path)) return false;
  const { code, stdout } = await runGit(path, ["rev-parse", "--show-toplevel"]);
  const top = new TextDecoder().decode(stdout).replace(/\r?\n$/, "");
  return code === 0 && isDirectory(top) && Deno.realPathSync(top) === Deno.realPathSync(path);
}

/** Changed in a checkout and not committed: staged, unstaged and untracked, both names of a rename. */
async function listUncommitted(checkout: string): Promise<string[]> {
  const flags = [
    "--porcelain",
    "-z",
    "--no-renames",
    "--untracked-files=all",
    "--ignore-submodules=none",
  ];
  const entries = splitNul(await readGit(checkout, ["status", ...flags]));
  return entries.map((entry) => entry.slice(3).replace(/\/$/, ""));
}

/** Everything a loop has changed in its worktree, committed or not, since it left the base. */
async function listChangedFiles(worktree: string, state: LoopState): Promise<string[]> {
  const changed = new Set(await listUncommitted(worktree));
  const base = await findBase(worktree, state);
  if (base !== null) {
    const flags = ["--name-only", "-z", "--no-renames", "--ignore-submodules=none"];
    for (const path of splitNul(await readGit(worktree, ["diff", ...flags, base, "HEAD"]))) {
      changed.add(path);
    }
  }
  return [...changed].sort();
}

/**
 * The commit that a loop's own commits start from: where its branch left the base branch (so that
 * merging the base in later is no drift), else the commit recorded when the worktree was made.
 */
async function findBase(worktree: string, state: LoopState): Promise<string | null> {
  const { base_branch: branch, base_commit: commit } = state;
  if (typeof branch === "string" && typeof commit === "string") {
    const isOnBranch = await runGit(worktree, ["merge-base", "--is-ancestor", commit, branch]);
    const merged = await runGit(worktree, ["merge-base", branch, "HEAD"]);
    if (isOnBranch.code === 0 && merged.code === 0) {
      return new TextDecoder().decode(merged.stdout).trim();
    }
  }
  return commit ?? null;
}

/** The files that a loop changed outside its scope; none where it has no worktree to look at. */
async function listOutOfScope(state: LoopState, config: LoopConfig): Promise<string[]> {
  const worktree = state.worktree_path;
  if (worktree === null || !(await isCheckout(worktree))) return [];
  const files = await listChangedFiles(worktree, state);
  return files.filter((path) => !isInScope(path, config.blast_radius?.file_scope));
}

// --- Gate ---

/** What the gate looks at; read once, under the loop's lock. */
interface GateSubject {
  readonly invocation: Invocation;
  readonly dir: string;
  readonly state: LoopState;
  readonly config: LoopConfig;
  readonly taskName: string | null;
  readonly task: TaskState | null;
  /** Non-local dollars spent; null where the harness reports none. */
  readonly spentUsd: number | null;
  /** Filled by the drift check. */
  readonly outOfScope: string[];
}

type GateCheck = (subject: GateSubject) => GateTrip | null | Promise<GateTrip | null>;

function checkIterations({ state, config }: GateSubject): GateTrip | null {
  const used = state.iteration_count - (state.iteration_base ?? 0);
  const allowed = config.brakes?.max_iterations ?? LOOP_DEFAULTS.maxIterations;
  if (used < allowed) return null;
  return {
    haltReason: "iterations_exhausted",
    detail: `${used} of ${countWords(allowed, "iteration")} used`,
  };
}

function checkBudget({ config, spentUsd }: GateSubject): GateTrip | null {
  const allowed = config.brakes?.max_budget_usd ?? null;
  if (allowed === null || spentUsd === null || spentUsd < allowed) return null;
  return { haltReason: "budget_exhausted", detail: `${spentUsd} of ${allowed} USD spent` };
}

function checkTaskPhase({ config, taskName, task }: GateSubject): GateTrip | null {
  if (taskName === null) return null;
  if (task === null) {
    return { haltReason: "human_intervention", detail: `task ${taskName} cannot be read` };
  }
  const allowed = config.allowed_phases ?? LOOP_DEFAULTS.allowedPhases;
  if (allowed.includes(task.phase)) return null;
  const detail = `task ${taskName} is in ${task.phase}, where this loop may not work`;
  return { haltReason: "human_intervention", detail };
}

async function checkDrift({ state, config, outOfScope }: GateSubject): Promise<GateTrip | null> {
  outOfScope.push(...await listOutOfScope(state, config));
  if (outOfScope.length === 0) return null;
  const listed = outOfScope.slice(0, 5).map((path) => JSON.stringify(path)).join(", ");
  const more = outOfScope.length > 5 ? ` and ${outOfScope.length - 5} more` : "";
  return {
    haltReason: "drift_detected",
    detail: `changed outside the file scope: ${listed}${more}`,
  };
}

function checkPlateau({ state, config }: GateSubject): GateTrip | null {
  const window = config.brakes?.score_plateau_window ?? LOOP_DEFAULTS.plateauWindow;
  if (!isPlateau(state.score_history, state.pass_history ?? [], window)) return null;
  const scores = state.score_history.slice(-window).join(", ");
  return {
    haltReason: "verifier_failed",
    detail: `no progress in ${window} ticks: scores ${scores}`,
  };
}

function checkModels({ invocation, config }: GateSubject): GateTrip | null {
  const file = readModels(invocation.project, invocation.framework);
  if (file === null || Object.keys(file.models).length < 2) return null;
  const [implement, verify] = (["implement", "verify"] as const)
    .map((role) => config.roles?.[role]?.model ?? file.default);
  const isConflict = implement === verify ||
    (file.conflicts ?? []).some((pair) =>
      pair.includes(implement ?? "") && pair.includes(verify ?? "")
    );
  if (!isConflict) return null;
  const detail = `implement (${implement ?? "no model"}) and verify (${verify ?? "no model"}) ` +
    "count as the same model";
  return { haltReason: "human_intervention", detail };
}

/** The checks after the status, in the order in which they answer. */
const GATE_CHECKS: readonly GateCheck[] = [
  checkIterations,
  checkBudget,
  checkTaskPhase,
  checkDrift,
  checkPlateau,
  checkModels,
];

/** Dollars of cost.json that count; best effort, since a harness writes the file as it likes. */
function readSpentUsd(dir: string): number | null {
  const path = join(dir, "cost.json");
  try {
    const cost: unknown = JSON.parse(readTextIfPresent(path) ?? "null");
    if (!isRecord(cost) || cost.local === true) return null;
    const total = cost.total_usd;
    return typeof total === "number" && Number.isFinite(total) && total >= 0 ? total : null;
  } catch (error) {
    console.error(`warning: Cannot read "${path}": ${(error as Error).message}`);
    return null;
  }
}

function readTaskOrNull(project: string, name: string | null): TaskState | null {
  if (name === null) return null;
  try {
    return readTask(project, name).task;
  } catch {
    return null; // The phase check says that it cannot be read.
  }
}

/** Halts a loop: state and log line; a halt that was there already keeps its reason. */
function haltLoop(dir: string, state: LoopState, trip: GateTrip): void {
  if (state.status === "halted") return;
  state.status = "halted";
  state.halt_reason = trip.haltReason;
  saveState(join(dir, ".state.loop"), state);
  logEvent(dir, "WARNING", "HALTED", {
    halt_reason: trip.haltReason,
    detail: trip.detail,
    iteration_count: state.iteration_count,
    resumed_count: state.resumed_count,
  });
}

const pauseRequestPath = (dir: string) => join(dir, "pause.request");

function removeIfPresent(path: string): void {
  try {
    Deno.removeSync(path);
  } catch (error) {
    if (!(error instanceof Deno.errors.NotFound)) throw error;
  }
}

/** Turns a pause request into the paused state; only for a running loop, under its lock. */
function honourPauseRequest(dir: string, state: LoopState): void {
  if (state.status !== "running" || !existsSync(pauseRequestPath(dir))) return;
  state.status = "paused";
  saveState(join(dir, ".state.loop"), state);
  removeIfPresent(pauseRequestPath(dir));
  logEvent(dir, "INFO", "PAUSED", { iteration_count: state.iteration_count });
}

/** Why a loop that is not running does not tick, in the gate's words. */
function describeStandstill(state: LoopState): string {
  return state.status === "halted" ? `halted:${state.halt_reason ?? "unknown"}` : state.status;
}

function hintForStandstill(state: LoopState): string {
  if (state.status === "halted") {
    return `status --loop-log ${state.name}, then status --approve --loop ${state.name}`;
  }
  if (state.status === "paused") return `status --resume-loop ${state.name}`;
  return "the loop has done its work; status --create-loop makes another";
}

async function runGateCommand(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "check-gate");
  const isDryRun = invocation.given.has("dry-run");
  return await withLoopLock(invocation, name, async (dir) => {
    const state = isDryRun ? peekState(dir) : loadLoopState(dir);
    if (!isDryRun) honourPauseRequest(dir, state);
    const { config } = readLoopConfig(dir);
    const taskName = optionalText(invocation, "task") ?? state.current_task;
    if (taskName !== null) checkName("task", taskName);
    const subject: GateSubject = {
      invocation,
      dir,
      state,
      config,
      taskName,
      task: readTaskOrNull(invocation.project, taskName),
      spentUsd: readSpentUsd(dir),
      outOfScope: [],
    };
    const reason = await applyGate(subject, isDryRun);
    return answerGate(subject, reason);
  });
}

function peekState(dir: string): LoopState {
  const path = join(dir, ".state.loop");
  const text = readTextIfPresent(path);
  if (text === null) throw new RefusedError(`Cannot open "${path}": no such file (untracked)`);
  return parseLoopState(text, path);
}

/** @returns "ok", or why not; a brake that trips has halted the loop by then (not in a dry run). */
async function applyGate(subject: GateSubject, isDryRun: boolean): Promise<string> {
  const { dir, state } = subject;
  if (state.status !== "running") return describeStandstill(state);
  for (const check of GATE_CHECKS) {
    const trip = await check(subject);
    if (trip === null) continue;
    if (isDryRun) [state.status, state.halt_reason] = ["halted", trip.haltReason];
    else haltLoop(dir, state, trip);
    return `halted:${trip.haltReason}`;
  }
  const notBefore = Date.parse(state.not_before ?? "");
  return notBefore > Date.now() ? "backoff" : "ok";
}

function answerGate(subject: GateSubject, reason: string): Answer {
  const { invocation, state, config, task, spentUsd } = subject;
  const allowed = config.brakes?.max_iterations ?? LOOP_DEFAULTS.maxIterations;
  const budget = config.brakes?.max_budget_usd ?? null;
  const ok = reason === "ok";
  const json = {
    ok,
    reason,
    halt_reason: state.halt_reason,
    remaining_iterations: Math.max(
      0,
      allowed - (state.iteration_count - (state.iteration_base ?? 0)),
    ),
    remaining_budget_usd: budget === null ? null : Math.max(0, budget - (spentUsd ?? 0)),
    task_phase: task?.phase ?? null,
    task_in_halt_loop: task !== null && isInHaltedLoop(invocation.project, task),
    out_of_scope_files: subject.outOfScope,
  };
  if (ok) return { json, text: `ok: ${countWords(json.remaining_iterations, "iteration")} left` };
  const hint = reason === "backoff"
    ? `the loop may go on at ${state.not_before}`
    : hintForStandstill(state);
  return { json, text: `not ok: ${reason}`, hint };
}

/** True when the loop that owns a task, or has it as its current one, is halted. */
function isInHaltedLoop(project: string, task: TaskState): boolean {
  return listLoops(project).some(({ name, state }) =>
    state?.status === "halted" && (task.loop === name || state.current_task === task.name)
  );
}

// --- Audit ---

type Finding = Omit<Violation, "resolved" | "task" | "loop"> & { task?: string; loop?: string };

const SEVERITIES = ["high", "med", "low"] as const;

/** Findings about one task folder. */
function auditTask(dir: string, name: string, isInComplete: boolean, stalledMs: number): Finding[] {
  const finding = (
    category: Finding["category"],
    severity: Finding["severity"],
    message: string,
  ) => ({
    category,
    severity,
    message,
    task: name,
  });
  let task: TaskState;
  try {
    const text = readTextIfPresent(join(dir, ".state"));
    if (text === null) return [finding(1, "high", `task ${name} has no .state (untracked)`)];
    task = parseTaskState(text, join(dir, ".state"));
  } catch (error) {
    return [finding(1, "high", (error as Error).message)];
  }
  if (!isKnownPhase(task.phase)) {
    return [finding(1, "high", `task ${name} is in the unknown phase "${task.phase}"`)];
  }
  const findings: Finding[] = [];
  const impossible = findImpossibleHistory(task);
  if (impossible !== null) findings.push(finding(1, "high", `task ${name}: ${impossible}`));
  for (const phase of listPhasesBehind(task)) {
    const document = PHASE_DOCUMENTS[phase]!;
    if (hasDocument(dir, document)) continue;
    findings.push(finding(2, "high", `task ${name} has left ${phase} without ${document}`));
  }
  const isInWork = task.approved_at !== null || task.loop !== null || task.claimed_by !== null;
  const isOpen = task.phase !== "complete" && task.phase !== WAITING_PHASE;
  const idleMs = Date.now() - Date.parse(task.updated_at);
  if (isOpen && isInWork && idleMs > stalledMs) {
    const days = Math.floor(idleMs / DAY_MS);
    findings.push(finding(3, "med", `task ${name} has not moved for ${countWords(days, "day")}`));
  }
  if (task.phase === "complete") {
    for (const document of ["SPEC.md", "BUG_REPORT.md"]) {
      const open = readTextIfPresent(join(dir, document))?.match(/^\s*[-*] \[ \]/gm)?.length ?? 0;
      const words = `${countWords(open, "unchecked item")} in ${document}`;
      if (open > 0) findings.push(finding(5, "med", `task ${name} is complete with ${words}`));
    }
  }
  if ((task.phase === "complete") !== isInComplete) {
    const words = isInComplete ? "lies in tasks/complete/ unfinished" : "is complete but not moved";
    findings.push(finding(5, "med", `task ${name} ${words}`));
  }
  return findings;
}

/** Who owns which task, as the loops have it. */
function auditOwnership(project: string, loops: readonly LoopView[]): Finding[] {
  const owners = new Map<string, string[]>();
  const findings: Finding[] = [];
  for (const { name, state } of loops) {
    if (state === null || state.current_task === null || state.status === "complete") continue;
    owners.set(state.current_task, [...owners.get(state.current_task) ?? [], name]);
    const task = readTaskOrNull(project, state.current_task);
    if (task === null) continue;
    if (
      task.loop !== null && task.loop !== name && loops.some((other) => other.name === task.loop)
    ) {
      owners.set(task.name, [...owners.get(task.name) ?? [], task.loop]);
    }
    const allowed = readConfigOrNull(project, name)?.allowed_phases ?? LOOP_DEFAULTS.allowedPhases;
    if (allowed.includes(task.phase)) continue;
    const message = `loop ${name} has task ${task.name} in ${task.phase}, where it may not work`;
    findings.push({ category: 4, severity: "high", task: task.name, loop: name, message });
  }
  for (const [task, claimants] of owners) {
    const names = [...new Set(claimants)].sort();
    if (names.length < 2) continue;
    const message = `task ${task} is claimed by ${names.length} loops: ${names.join(", ")}`;
    findings.push({ category: 4, severity: "high", task, message });
  }
  return findings;
}

function readConfigOrNull(project: string, name: string): LoopConfig | null {
  try {
    return readLoopConfig(join(loopsDir(project), name)).config;
  } catch {
    return null; // An invalid loop.json is a finding of its own (category 6).
  }
}

/** When a loop last woke, worked or not: the time of its lock file, else of its last tick. */
function lastWake(view: LoopView): number | null {
  const ticked = Date.parse(view.state?.last_tick_at ?? EPOCH);
  let woken = 0;
  try {
    woken = Deno.statSync(join(view.dir, ".state.lock")).mtime?.getTime() ?? 0;
  } catch {
    // No tick has locked this loop yet.
  }
  const latest = Math.max(
    Number.isNaN(ticked) ? 0 : ticked,
    readLockNote(join(view.dir, ".state.lock")) ? woken : 0,
  );
  return latest > 0 ? latest : null;
}

/** Findings about one loop: its state, its files, its scope. */
async function auditLoop(view: LoopView): Promise<Finding[]> {
  const { name, dir, state } = view;
  const findings: Finding[] = [];
  const add = (category: Finding["category"], severity: Finding["severity"], message: string) => {
    findings.push({ category, severity, message, loop: name });
  };
  if (state === null) add(1, "high", `loop ${name}: ${view.problem}`);
  let config: LoopConfig | null = null;
  try {
    config = readLoopConfig(dir).config;
  } catch (error) {
    add(6, "low", (error as Error).message);
  }
  if (state !== null && config !== null) {
    for (const path of await listOutOfScopeOrNone(state, config)) {
      add(4, "high", `loop ${name} changed ${JSON.stringify(path)} outside its file scope`);
    }
    const intervalMs = (config.schedule?.interval_seconds ?? LOOP_DEFAULTS.intervalSeconds) * 1000;
    const wake = lastWake(view);
    if (state.status === "running" && wake !== null && Date.now() - wake > 3 * intervalMs) {
      add(
        6,
        "low",
        `loop ${name} has not ticked for more than three intervals (${
          describeAge(Date.now() - wake)
        })`,
      );
    }
  }
  for (const worktree of listLeftoverWorktrees(view)) {
    add(6, "low", `loop ${name} leaves the folder ${worktree} behind`);
  }
  const logBytes = fileSize(join(dir, ".state.log"));
  if (logBytes > LOG_LIMIT_BYTES) {
    add(6, "low", `loop ${name} has a log of ${logBytes} bytes, over the cap`);
  }
  return findings;
}

async function listOutOfScopeOrNone(state: LoopState, config: LoopConfig): Promise<string[]> {
  try {
    return await listOutOfScope(state, config);
  } catch (error) {
    console.error(`warning: ${(error as Error).message}`);
    return [];
  }
}

function fileSize(path: string): number {
  try {
    return Deno.statSync(path).size;
  } catch {
    return 0; // Nothing there takes no room.
  }
}

/** Worktree folders that no running loop uses. */
function listLeftoverWorktrees({ dir, state }: LoopView): string[] {
  const isDone = state === null || state.status === "complete";
  return listFolders(dir).filter((name) =>
    name.startsWith("worktree.") || (isDone && name === "worktree")
  );
}

/** One folder of tasks: what is wrong with it, and how many there are. */
function auditTasks(
  project: string,
  stalledMs: number,
): { findings: Finding[]; total: number; untracked: number } {
  const findings: Finding[] = [];
  let [total, untracked] = [0, 0];
  for (const parent of [tasksDir(project), join(tasksDir(project), "complete")]) {
    const isInComplete = basename(parent) === "complete";
    for (const name of listFolders(parent)) {
      if (name.startsWith(".") || (!isInComplete && name === "complete")) continue;
      total++;
      const dir = join(parent, name);
      if (!existsSync(join(dir, ".state"))) untracked++;
      findings.push(...auditTask(dir, name, isInComplete, stalledMs));
    }
  }
  return { findings, total, untracked };
}

async function runAudit(invocation: Invocation): Promise<Answer> {
  const { project } = invocation;
  const days = readWholeNumber(invocation.given, "stalled-days", { min: 1, max: 3650 });
  const tasks = auditTasks(project, (days ?? DEFAULT_STALLED_DAYS) * DAY_MS);
  const loops = listLoops(project);
  const findings = [...tasks.findings, ...auditOwnership(project, loops)];
  for (const view of loops) findings.push(...await auditLoop(view));
  const violations: Violation[] = findings.map(({ category, severity, message, task, loop }) => ({
    category,
    severity,
    task: task ?? null,
    loop: loop ?? null,
    message,
    resolved: false,
  }));
  violations.sort(compareViolations);
  const json = {
    violations,
    loops: loops.map(summarizeLoop),
    total_tasks: tasks.total,
    untracked_tasks: tasks.untracked,
  };
  return { json, text: renderAudit(violations, loops, tasks.total, tasks.untracked) };
}

function compareViolations(a: Violation, b: Violation): number {
  const bySeverity = SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity);
  if (bySeverity !== 0) return bySeverity;
  if (a.category !== b.category) return a.category - b.category;
  const [left, right] = [`${a.task ?? ""} ${a.message}`, `${b.task ?? ""} ${b.message}`];
  return left < right ? -1 : left > right ? 1 : 0;
}

function summarizeLoop({ name, state }: LoopView): Record<string, unknown> {
  return {
    name,
    status: state?.status ?? null,
    halt_reason: state?.halt_reason ?? null,
    iteration_count: state?.iteration_count ?? null,
    last_tick_at: state?.last_tick_at ?? null,
    schedule: null,
  };
}

const CATEGORY_TITLES: Readonly<Record<Violation["category"], string>> = {
  1: "State",
  2: "Documents",
  3: "Stalled",
  4: "Ownership and scope",
  5: "Unfinished business",
  6: "Housekeeping",
};

function renderAudit(
  violations: readonly Violation[],
  loops: readonly LoopView[],
  total: number,
  untracked: number,
): string {
  const lines = [
    `${countWords(total, "task")} (${untracked} untracked), ${countWords(loops.length, "loop")}`,
  ];
  for (const [category, title] of Object.entries(CATEGORY_TITLES)) {
    const own = violations.filter((violation) => violation.category === Number(category));
    lines.push("", `${category} ${title}: ${own.length === 0 ? "nothing found" : own.length}`);
    for (const { severity, message } of own) lines.push(`  ${severity.padEnd(4)}  ${message}`);
  }
  if (loops.length > 0) lines.push("", "Loops:");
  for (const view of loops) {
    lines.push(
      `  ${view.name}: ${view.state === null ? view.problem : describeStatus(view.state)}`,
    );
  }
  return lines.join("\n");
}

function describeStatus(state: LoopState): string {
  return state.status === "halted" ? `halted (${state.halt_reason ?? "unknown"})` : state.status;
}

// --- Commands: tasks ---

function optionalText(invocation: Invocation, name: string): string | null {
  const value = invocation.given.get(name);
  return typeof value === "string" ? value : null;
}

function readText(invocation: Invocation, name: string): string {
  const value = optionalText(invocation, name);
  if (value === null) throw new UsageError(`Cannot run without flag "--${name}": it is missing`);
  return value;
}

/** A free text that ends up in a state file: one line, of a length that fits a screen. */
function readLine(invocation: Invocation, name: string): string | null {
  const value = optionalText(invocation, name);
  // deno-lint-ignore no-control-regex -- control characters are what is looked for.
  if (value !== null && (/[\u0000-\u001f\u007f]/.test(value) || value.length > 2000)) {
    throw new UsageError(
      `Cannot use flag "--${name}": it must be one line of at most 2000 characters`,
    );
  }
  return value;
}

function runCreateTask(invocation: Invocation): Answer {
  const { project } = invocation;
  const name = checkName("task", readText(invocation, "create-task"));
  if (name === "complete") {
    throw new UsageError('Cannot use task name "complete": finished tasks live there');
  }
  const phase = optionalText(invocation, "phase") ?? "research";
  if (phase === "complete" || !(PHASES as readonly string[]).includes(phase)) {
    throw new UsageError(
      `Cannot use phase "${phase}": a task starts in one of ${PHASES.slice(0, -1).join(", ")}`,
    );
  }
  const actor = describeActor();
  if (actor !== "person" && phase !== "research") {
    throw new RefusedError(
      `Cannot create task "${name}" in ${phase}: only a person may; a loop's tasks start in research`,
    );
  }
  const existing = findTaskDir(project, name);
  if (existing !== null) {
    throw new RefusedError(
      `Cannot create task "${name}": ${existing} exists`,
      `status --task ${name}`,
    );
  }
  const now = new Date().toISOString();
  const isApproved = PHASES.indexOf(phase as never) >= PHASES.indexOf("implement");
  const task: TaskState = {
    schema_version: 1,
    name,
    title: readLine(invocation, "title") ?? name,
    phase,
    previous_phase: null,
    created_at: now,
    updated_at: now,
    approved_at: isApproved ? now : null,
    claimed_by: null,
    loop: null,
    history: [{ at: now, from: null, to: phase, by: actor, reason: null }],
  };
  const dir = createFolderWhole(
    tasksDir(project),
    name,
    (made) => saveState(join(made, ".state"), task),
  );
  return {
    json: { ok: true, task: name, phase, dir },
    text: `created task ${name} in ${phase}: ${dir}`,
  };
}

/** Makes a folder that appears with its content or not at all; a second maker loses the race. */
function createFolderWhole(parent: string, name: string, fill: (dir: string) => void): string {
  ensureDirSync(parent);
  const making = Deno.makeTempDirSync({ dir: parent, prefix: `.${name}.` });
  try {
    if (Deno.build.os !== "windows") Deno.chmodSync(making, 0o755);
    fill(making);
    Deno.renameSync(making, join(parent, name));
  } catch (error) {
    Deno.removeSync(making, { recursive: true });
    if (existsSync(join(parent, name))) {
      throw new RefusedError(`Cannot create "${join(parent, name)}": somebody else just did`);
    }
    throw error;
  }
  syncDirectory(parent);
  return join(parent, name);
}

function runShowTask(invocation: Invocation): Answer {
  const { dir, task } = readTask(invocation.project, readText(invocation, "task"));
  const document = PHASE_DOCUMENTS[task.phase] ?? null;
  const json = {
    ...task,
    dir,
    document,
    has_document: document !== null && hasDocument(dir, document),
    next_phase: nextPhase(task.phase),
    needs_approval: task.phase === "spec" && task.approved_at === null,
  };
  const lines = [
    `${task.name}: ${task.title}`,
    ...renderTable([
      ["phase", task.phase],
      [
        "document",
        document === null ? "-" : `${document} (${json.has_document ? "present" : "missing"})`,
      ],
      ["approved", task.approved_at ?? "no"],
      ["loop", task.loop ?? "-"],
      ["claimed by", task.claimed_by ?? "-"],
      ["folder", dir],
    ]).trimEnd().split("\n").map((line) => `  ${line}`),
    "history:",
    ...task.history.map(({ at, from, to, by, reason }) =>
      `  ${at}  ${from ?? "(new)"} -> ${to}  by ${by}${reason === null ? "" : `: ${reason}`}`
    ),
  ];
  return { json, text: lines.join("\n") };
}

/**
 * Why a step is not allowed, or null when it is.
 *
 * @param hasOwnDocument Whether the phase being left has its document.
 */
export function refuseStep(
  task: Pick<TaskState, "name" | "phase" | "approved_at">,
  target: string,
  { hasOwnDocument, reason }: { hasOwnDocument: boolean; reason: string | null },
): RefusedError | null {
  const { name, phase } = task;
  const refuse = (why: string, hint?: string) =>
    new RefusedError(`Cannot move task "${name}" from ${phase} to ${target}: ${why}`, hint);
  if (target === phase) return refuse("it is there already");
  if (phase === WAITING_PHASE) {
    return refuse("it waits for a person", `status --approve --task ${name}`);
  }
  if (!isKnownPhase(phase)) return refuse("its phase is unknown", "status --audit");
  const [from, to] = [phase, target].map((each) => PHASES.indexOf(each as never)) as [
    number,
    number,
  ];
  if (target === WAITING_PHASE) {
    if (phase === "complete") return refuse("a finished task waits for nobody");
    return reason === null ? refuse("that needs a reason", "add --reason TEXT") : null;
  }
  if (to < from) {
    const isUsual = target === "implement" && (phase === "code_review" || phase === "bug_hunt");
    return isUsual || reason !== null
      ? null
      : refuse("a step back needs a reason", "add --reason TEXT");
  }
  if (to > from + 1) return refuse(`the next phase is ${nextPhase(phase)}`);
  if (!hasOwnDocument) {
    return refuse(
      `${PHASE_DOCUMENTS[phase]} is missing or empty`,
      `write ${PHASE_DOCUMENTS[phase]} first`,
    );
  }
  if (phase === "spec" && task.approved_at === null) {
    return refuse("a person has not approved it", `status --approve --task ${name}`);
  }
  return null;
}

async function runTransition(invocation: Invocation): Promise<Answer> {
  const target = readText(invocation, "transition");
  const name = readText(invocation, "task");
  if (!isKnownPhase(target)) {
    const known = [...PHASES, WAITING_PHASE];
    const nearest = findNearest(target, known);
    throw new UsageError(
      `Cannot use phase "${target}": ${
        nearest === null ? `it is none of ${known.join(", ")}` : `did you mean ${nearest}?`
      }`,
    );
  }
  const reason = readLine(invocation, "reason");
  const { dir, task } = await updateTask(invocation.project, name, (task, taskDir) => {
    if (isInHaltedLoop(invocation.project, task)) {
      const owner = task.loop ?? "its loop";
      throw new RefusedError(
        `Cannot move task "${name}" to ${target}: ${owner} is halted`,
        `status --approve --loop ${task.loop ?? "NAME"}`,
      );
    }
    const document = PHASE_DOCUMENTS[task.phase];
    const hasOwnDocument = document !== undefined && hasDocument(taskDir, document);
    const refusal = refuseStep(task, target, { hasOwnDocument, reason });
    if (refusal !== null) throw refusal;
    useUpOperation();
    moveTask(task, target, reason);
  });
  const json = { ok: true, task: name, from: task.previous_phase, phase: task.phase, dir };
  return { json, text: `${name}: ${task.previous_phase} -> ${task.phase}` };
}

/** Writes a step into a task: phase, history, and what a step undoes. */
function moveTask(task: TaskState, target: string, reason: string | null): void {
  const now = new Date().toISOString();
  task.history.push({ at: now, from: task.phase, to: target, by: describeActor(), reason });
  task.previous_phase = task.phase;
  task.phase = target;
  // A specification that is opened again has to be approved again.
  if (
    PHASES.indexOf(target as never) >= 0 &&
    PHASES.indexOf(target as never) < PHASES.indexOf("implement")
  ) {
    task.approved_at = null;
  }
  if (target === "complete" || target === WAITING_PHASE) task.loop = null;
}

/** An orchestrate session may take one step a tick: the first makes the file, a second finds it. */
function useUpOperation(): void {
  if (readEnv("AUTOMATON_ROLE") !== "orchestrate") return;
  const path = readEnv("AUTOMATON_OP_FILE");
  if (path === undefined) {
    throw new RefusedError("Cannot take a step as orchestrate: AUTOMATON_OP_FILE is not set");
  }
  try {
    Deno.openSync(path, { write: true, createNew: true }).close();
  } catch (error) {
    if (error instanceof Deno.errors.AlreadyExists) {
      throw new RefusedError("Cannot take a second step: this tick has had its one status command");
    }
    throw error;
  }
}

async function runApprove(invocation: Invocation): Promise<Answer> {
  const [task, loop] = [optionalText(invocation, "task"), optionalText(invocation, "loop")];
  if (task !== null && loop !== null) {
    throw new UsageError("Cannot approve a task and a loop at once: give --task or --loop");
  }
  if (task !== null) return await approveTask(invocation, task);
  if (loop !== null) return await approveLoop(invocation, loop);
  throw new UsageError('Cannot run "--approve": give --task or --loop');
}

async function approveTask({ project }: Invocation, name: string): Promise<Answer> {
  const { task } = await updateTask(project, name, (task, dir) => {
    const isWaiting = task.phase === WAITING_PHASE;
    const gatePhase = isWaiting ? task.previous_phase : task.phase;
    const isAtGate = gatePhase === "spec" && hasDocument(dir, "SPEC.md");
    if (!isWaiting && task.phase !== "spec") {
      throw new RefusedError(
        `Cannot approve task "${name}": in ${task.phase} there is nothing to approve`,
      );
    }
    if (!isWaiting && !isAtGate) {
      throw new RefusedError(
        `Cannot approve task "${name}": SPEC.md is missing or empty`,
        "write SPEC.md first",
      );
    }
    const approvedBefore = task.approved_at;
    if (!isWaiting && approvedBefore !== null) {
      throw new RefusedError(
        `Cannot approve task "${name}": it was approved at ${approvedBefore}`,
        `status --transition implement --task ${name}`,
      );
    }
    if (isWaiting) {
      moveTask(task, isAtGate ? "implement" : task.previous_phase ?? "research", "approved");
    }
    task.approved_at = isAtGate ? new Date().toISOString() : approvedBefore;
  });
  const json = { ok: true, task: name, phase: task.phase, approved_at: task.approved_at };
  const hint = task.phase === "spec"
    ? { hint: `status --transition implement --task ${name}` }
    : {};
  return { json, text: `approved task ${name}: now in ${task.phase}`, ...hint };
}

async function runClaim(invocation: Invocation): Promise<Answer> {
  const [name, session] = [readText(invocation, "task"), readLine(invocation, "session")!];
  await updateTask(invocation.project, name, (task) => {
    if (task.phase === "complete") {
      throw new RefusedError(`Cannot claim task "${name}": it is complete`);
    }
    const holder = task.claimed_by ?? (task.loop === null ? null : `loop ${task.loop}`);
    if (holder !== null && holder !== session) {
      throw new RefusedError(
        `Cannot claim task "${name}": ${holder} has it`,
        `status --release --task ${name}`,
      );
    }
    task.claimed_by = session;
  });
  return {
    json: { ok: true, task: name, claimed_by: session },
    text: `task ${name} is claimed by ${session}`,
  };
}

async function runRelease(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "task");
  await updateTask(invocation.project, name, (task) => {
    const owner = task.loop === null ? null : viewLoop(invocation.project, task.loop);
    task.claimed_by = null;
    if (owner?.state?.status !== "running" || owner.state.current_task !== name) task.loop = null;
  });
  return { json: { ok: true, task: name, claimed_by: null }, text: `task ${name} is released` };
}

/** May a file, or the sources at large, be changed for a task or by a loop; the reason either way. */
function runCanEdit(invocation: Invocation): Answer {
  const { project } = invocation;
  const loop = optionalText(invocation, "loop");
  const isWorktree = invocation.given.has("loop-worktree");
  if (isWorktree && loop === null) {
    throw new UsageError('Cannot use "--loop-worktree" without "--loop"');
  }
  const file = optionalText(invocation, "file");
  const verdict = judgeEdit({
    project,
    file,
    loop,
    isWorktree,
    taskName: optionalText(invocation, "task"),
  });
  return {
    json: { allowed: verdict.allowed, reason: verdict.reason, file, task: verdict.task },
    text: `${verdict.allowed ? "allowed" : "denied"}: ${verdict.reason}`,
    exitCode: verdict.allowed ? 0 : 1,
    ...(verdict.allowed ? {} : { hint: "status --task NAME shows what may be done now" }),
  };
}

interface EditQuestion {
  readonly project: string;
  readonly file: string | null;
  readonly loop: string | null;
  readonly isWorktree: boolean;
  readonly taskName: string | null;
}

interface EditVerdict {
  readonly allowed: boolean;
  readonly reason: string;
  readonly task: string | null;
}

function judgeEdit(question: EditQuestion): EditVerdict {
  const { project, file, loop, isWorktree } = question;
  const view = loop === null ? null : viewLoop(project, basename(findLoopDir(project, loop)));
  if (view !== null && view.state === null) {
    return { allowed: false, reason: `loop ${loop}: ${view.problem}`, task: null };
  }
  const state = view?.state ?? null;
  const root = isWorktree ? state!.worktree_path : project;
  if (root === null) return { allowed: false, reason: `loop ${loop} has no worktree`, task: null };
  let place: FilePlace | null;
  try {
    place = file === null ? null : placeFile(project, root, file);
  } catch (error) {
    return { allowed: false, reason: (error as Error).message, task: null };
  }
  const task = question.taskName ?? place?.task ?? state?.current_task ?? null;
  const verdict = (allowed: boolean, reason: string): EditVerdict => ({ allowed, reason, task });
  if (task === null) return verdict(false, "no task is named, so none can be in a phase for edits");
  const phase = readTask(project, task).task.phase;
  if (phase === "complete") return verdict(false, `task ${task} is complete`);
  if (place?.kind === "outside") {
    return verdict(false, `${file} leads to ${place.path}, outside ${root}`);
  }
  if (place?.kind === "private") return verdict(false, `${place.path} is changed by status alone`);
  if (place?.kind === "task") {
    if (place.task !== task) {
      return verdict(false, `${file} belongs to task ${place.task}, not ${task}`);
    }
    return verdict(true, `${file} is a file of task ${task}, which is in ${phase}`);
  }
  if (phase !== "implement") {
    return verdict(false, `task ${task} is in ${phase}; sources change in implement`);
  }
  if (state?.status === "halted") return verdict(false, `loop ${loop} is halted`);
  const scope = loop === null
    ? undefined
    : readLoopConfig(view!.dir).config.blast_radius?.file_scope;
  if (place !== null && !isInScope(place.path, scope)) {
    return verdict(false, `${place.path} is outside the file scope of loop ${loop}`);
  }
  return verdict(true, `task ${task} is in implement`);
}

type FilePlace =
  | {
    readonly kind: "source" | "private" | "outside";
    readonly path: string;
    readonly task?: never;
  }
  | { readonly kind: "task"; readonly path: string; readonly task: string };

/** Where a file really lies: a source below the root, a task's own file, or somewhere else. */
function placeFile(project: string, root: string, file: string): FilePlace {
  const real = resolveRealPath(isAbsolute(file) ? file : join(root, file));
  const inTasks = pathBelow(resolveRealPath(tasksDir(project)), real);
  if (inTasks !== null) {
    const parts = inTasks.split("/");
    if (parts[0] === "complete") parts.shift();
    const [task, ...rest] = parts;
    const isFile = task !== undefined && NAME_PATTERN.test(task) && rest.length > 0;
    if (!isFile || rest[0]!.startsWith(".")) return { kind: "private", path: real };
    return { kind: "task", path: real, task };
  }
  const inRoot = pathBelow(Deno.realPathSync(root), real);
  if (inRoot === null || inRoot === "") return { kind: "outside", path: real };
  const top = inRoot.split("/")[0]!.toLowerCase();
  if (top === ".git" || top === ".automaton") return { kind: "private", path: real };
  return { kind: "source", path: inRoot };
}

async function runScopeCheck(invocation: Invocation): Promise<Answer> {
  const { project } = invocation;
  const taskName = optionalText(invocation, "task");
  const loop = optionalText(invocation, "loop") ??
    (taskName === null ? null : readTask(project, taskName).task.loop);
  let files: string[];
  if (loop !== null) {
    const dir = findLoopDir(project, loop);
    files = await listOutOfScope(peekState(dir), readLoopConfig(dir).config);
  } else if (taskName !== null) {
    files = await listUnexpectedSources(project, taskName);
  } else {
    throw new UsageError('Cannot run "--scope-check": give --task or --loop');
  }
  const ok = files.length === 0;
  return {
    json: { ok, task: taskName, loop, out_of_scope_files: files },
    text: ok
      ? "nothing is changed outside the scope"
      : files.map((path) => `out of scope: ${path}`).join("\n"),
    exitCode: ok ? 0 : 1,
    ...(ok ? {} : { hint: "undo these changes, or widen blast_radius.file_scope in loop.json" }),
  };
}

/** Sources changed in the person's checkout while a task is in a phase that changes none. */
async function listUnexpectedSources(project: string, taskName: string): Promise<string[]> {
  if (readTask(project, taskName).task.phase === "implement") return [];
  if (!(await isCheckout(project))) return [];
  return (await listUncommitted(project)).filter((path) => !path.startsWith(".automaton/")).sort();
}

// --- Commands: loops ---

async function runCreateLoop(invocation: Invocation): Promise<Answer> {
  const { project, framework } = invocation;
  const name = checkName("loop", readText(invocation, "create-loop"));
  const template = checkName("template", readText(invocation, "from-template"));
  const templates = join(framework, "templates", "loops");
  const source = join(templates, template);
  if (!existsSync(join(source, "loop.json"))) {
    const known = listFolders(templates).join(", ");
    throw new RefusedError(
      `Cannot open template "${template}": there is none in ${templates}`,
      `templates: ${known}`,
    );
  }
  const dir = join(loopsDir(project), name);
  if (isLoopDir(dir)) {
    throw new RefusedError(
      `Cannot create loop "${name}": ${dir} exists`,
      `status --remove-loop ${name}`,
    );
  }
  const taskName = optionalText(invocation, "task");
  if (taskName !== null) readTask(project, taskName);
  const config = instantiateTemplate(join(source, "loop.json"), {
    name,
    schema: join(templates, "loop.schema.json"),
    hasWorktree: !invocation.given.has("no-worktree"),
  });
  ensureDirSync(dir);
  copyTemplateFiles(source, dir);
  writeFileAtomic(join(dir, "loop.json"), `${JSON.stringify(config, null, 2)}\n`);
  saveState(join(dir, ".state.loop"), makeLoopState(name));
  logEvent(dir, "INFO", "CREATED", { template });
  if (taskName !== null) await claimForLoop(invocation, name, taskName, dir);
  const json = { ok: true, loop: name, template, dir, task: taskName };
  return { json, text: `created loop ${name} from template ${template}: ${dir}` };
}

/** A template's loop.json with the loop's own name; checked before anything is written. */
function instantiateTemplate(
  path: string,
  { name, schema, hasWorktree }: { name: string; schema: string; hasWorktree: boolean },
): Record<string, unknown> {
  const { config, warnings } = parseLoopConfig(Deno.readTextFileSync(path), path);
  for (const warning of warnings) console.error(`warning: ${warning}`);
  const blastRadius = hasWorktree
    ? config.blast_radius
    : { ...config.blast_radius, worktree: false };
  const fields = { ...config, $schema: schema, name };
  return blastRadius === undefined ? fields : { ...fields, blast_radius: blastRadius };
}

/** What a template brings besides loop.json: a scripted agent, prompts of its own. */
function copyTemplateFiles(source: string, target: string): void {
  for (const entry of Deno.readDirSync(source)) {
    if (entry.name === "loop.json") continue;
    const [from, to] = [join(source, entry.name), join(target, entry.name)];
    if (entry.isDirectory) {
      ensureDirSync(to);
      copyTemplateFiles(from, to);
    } else Deno.copyFileSync(from, to);
  }
}

async function runHaltLoop(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "halt-loop");
  const reason = readText(invocation, "reason");
  const haltReason = HALT_REASONS.find((known) => known === reason);
  if (haltReason === undefined) {
    throw new UsageError(`Cannot use reason "${reason}": it is none of ${HALT_REASONS.join(", ")}`);
  }
  const detail = readLine(invocation, "detail") ?? `halted by ${describeActor()}`;
  return await withLoopLock(invocation, name, (dir) => {
    const state = loadLoopState(dir);
    const wasHalted = state.status === "halted";
    haltLoop(dir, state, { haltReason, detail });
    const json = { ok: true, loop: name, status: state.status, halt_reason: state.halt_reason };
    const text = wasHalted
      ? `loop ${name} was halted before: ${state.halt_reason}`
      : `halted loop ${name}: ${haltReason}`;
    return { json, text };
  });
}

async function runRemoveLoop(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "remove-loop");
  const isForced = invocation.given.has("force");
  const isPurged = invocation.given.has("purge");
  return await withLoopLock(invocation, name, async (dir) => {
    await removeWorktree(invocation.project, dir, isForced);
    await releaseTasksOf(invocation.project, name, null);
    const kept = isPurged ? [] : [".state.lock", "outputs", ...listLogs(dir)];
    // The state goes last but the folder: a removal cut short can be run again.
    const entries = [...Deno.readDirSync(dir)].map((entry) => entry.name).filter((entry) =>
      !kept.includes(entry)
    );
    for (const entry of entries.sort()) Deno.removeSync(join(dir, entry), { recursive: true });
    if (isPurged) Deno.removeSync(dir, { recursive: true });
    const json = { ok: true, loop: name, kept: isPurged ? null : dir };
    return { json, text: `removed loop ${name}${isPurged ? "" : `; its logs stay in ${dir}`}` };
  });
}

function listLogs(dir: string): string[] {
  return [...Deno.readDirSync(dir)].map((entry) => entry.name).filter((name) =>
    name.startsWith(".state.log")
  );
}

/** Removes a loop's worktree, where nothing in it would be lost; its branch always stays. */
async function removeWorktree(project: string, dir: string, isForced: boolean): Promise<void> {
  const worktree = join(dir, "worktree");
  if (!isDirectory(worktree)) return;
  const isOwn = await isCheckout(worktree);
  const uncommitted = isOwn ? await listUncommitted(worktree) : listFolderEntries(worktree);
  if (uncommitted.length > 0 && !isForced) {
    throw new RefusedError(
      `Cannot remove "${worktree}": ${countWords(uncommitted.length, "uncommitted file")}, "${
        uncommitted[0]
      }" first`,
      "commit or undo them, or add --force to lose them",
    );
  }
  if (!isOwn) return Deno.removeSync(worktree, { recursive: true });
  // Nothing uncommitted is left to protect; git itself refuses clean worktrees with submodules.
  await readGit(project, ["worktree", "remove", "--force", "--force", worktree]);
}

function listFolderEntries(path: string): string[] {
  return [...Deno.readDirSync(path)].map((entry) => entry.name);
}

/** Gives back the tasks that a loop owns, but for the one it keeps. */
async function releaseTasksOf(project: string, loop: string, keep: string | null): Promise<void> {
  for (const name of listFolders(tasksDir(project))) {
    if (name === keep || !NAME_PATTERN.test(name) || readTaskOrNull(project, name)?.loop !== loop) {
      continue;
    }
    await updateTask(project, name, (task) => {
      if (task.loop === loop) task.loop = null;
    });
  }
}

async function runPauseLoop(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "pause-loop");
  const dir = findLoopDir(invocation.project, name);
  const view = viewLoop(invocation.project, name);
  if (view.state?.status === "halted" || view.state?.status === "complete") {
    throw new RefusedError(
      `Cannot pause loop "${name}": it is ${describeStatus(view.state)}, so it does not tick`,
    );
  }
  const isNow = invocation.given.has("now");
  const request = { at: new Date().toISOString(), by: describeActor(), now: isNow };
  writeFileAtomic(pauseRequestPath(dir), `${JSON.stringify(request)}\n`);
  const lock = await acquireLock(join(dir, ".state.lock"), 0);
  if (lock === null) {
    const when = isNow ? "ends its harness now" : "stops before its next role";
    return {
      json: { ok: true, loop: name, status: "pausing" },
      text: `loop ${name} is in a tick, which ${when}; then it is paused`,
    };
  }
  try {
    const state = loadLoopState(dir);
    honourPauseRequest(dir, state);
    removeIfPresent(pauseRequestPath(dir));
    if (state.status !== "paused") {
      throw new RefusedError(`Cannot pause loop "${name}": it is ${describeStatus(state)}`);
    }
    return {
      json: { ok: true, loop: name, status: "paused" },
      text: `paused loop ${name}`,
      hint: `status --resume-loop ${name}`,
    };
  } finally {
    lock.close();
  }
}

async function runResumeLoop(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "resume-loop");
  return await withLoopLock(invocation, name, (dir) => {
    const state = loadLoopState(dir);
    if (state.status === "halted" || state.status === "complete") {
      throw new RefusedError(
        `Cannot resume loop "${name}": it is ${describeStatus(state)}, not paused`,
        hintForStandstill(state),
      );
    }
    removeIfPresent(pauseRequestPath(dir));
    const wasPaused = state.status === "paused";
    if (wasPaused) {
      state.status = "running";
      saveState(join(dir, ".state.loop"), state);
      logEvent(dir, "INFO", "RESUMED");
    }
    return {
      json: { ok: true, loop: name, status: "running" },
      text: wasPaused ? `resumed loop ${name}` : `loop ${name} is running already`,
    };
  });
}

async function approveLoop(invocation: Invocation, name: string): Promise<Answer> {
  return await withLoopLock(invocation, name, (dir) => {
    const state = loadLoopState(dir);
    if (state.status !== "halted") {
      throw new RefusedError(`Cannot approve loop "${name}": it is ${state.status}, not halted`);
    }
    const clearedReason = state.halt_reason;
    Object.assign(state, {
      status: "running",
      halt_reason: null,
      resumed_count: state.resumed_count + 1,
      last_verdict: null,
      score_history: [],
      pass_history: [],
      consecutive_failures: 0,
      not_before: null,
      iteration_base: state.iteration_count,
    });
    saveState(join(dir, ".state.loop"), state);
    removeIfPresent(pauseRequestPath(dir));
    logEvent(dir, "INFO", "APPROVED", {
      cleared: clearedReason,
      resumed_count: state.resumed_count,
    });
    const json = {
      ok: true,
      loop: name,
      status: "running",
      cleared: clearedReason,
      resumed_count: state.resumed_count,
    };
    return { json, text: `approved loop ${name}: ${clearedReason} is cleared` };
  });
}

function runCanContinue(invocation: Invocation): Answer {
  const name = readText(invocation, "can-continue");
  const dir = findLoopDir(invocation.project, name);
  const state = peekState(dir);
  const isPausing = state.status === "running" && existsSync(pauseRequestPath(dir));
  const word = isPausing
    ? "PAUSED"
    : state.status === "running"
    ? "OK"
    : state.status.toUpperCase();
  const { halt_reason, iteration_count, resumed_count } = state;
  return {
    json: { state: word, loop: name, halt_reason, iteration_count, resumed_count },
    text: halt_reason === null ? word : `${word}: ${halt_reason}`,
    ...(word === "OK"
      ? {}
      : { hint: isPausing ? `status --resume-loop ${name}` : hintForStandstill(state) }),
  };
}

async function runClaimLoopTask(invocation: Invocation): Promise<Answer> {
  const [name, task] = [readText(invocation, "claim-loop-task"), readText(invocation, "task")];
  return await withLoopLock(invocation, name, async (dir) => {
    await claimForLoop(invocation, name, task, dir);
    return { json: { ok: true, loop: name, task }, text: `task ${task} belongs to loop ${name}` };
  });
}

/** Makes a loop the owner of a task, unless another loop or somebody's session has it. */
async function claimForLoop(
  invocation: Invocation,
  loop: string,
  taskName: string,
  dir: string,
): Promise<void> {
  const { project } = invocation;
  const others = listLoops(project).filter((view) =>
    view.name !== loop && view.state?.status !== "complete"
  );
  await updateTask(project, taskName, (task) => {
    const refuse = (why: string) =>
      new RefusedError(`Cannot claim task "${taskName}" for loop "${loop}": ${why}`);
    if (task.phase === "complete" || task.phase === WAITING_PHASE) {
      throw refuse(`it is in ${task.phase}`);
    }
    const owner = others.find(({ name, state }) =>
      task.loop === name || state?.current_task === taskName
    );
    if (owner !== undefined) throw refuse(`loop ${owner.name} has it`);
    if (task.claimed_by !== null) throw refuse(`${task.claimed_by} has it`);
    task.loop = loop;
  });
  await releaseTasksOf(project, loop, taskName);
  // Within a tick the runner saves the current task itself, in the tick's one save.
  if (readEnv("AUTOMATON_NO_LOOP_LOCK") === "1") return;
  const state = loadLoopState(dir);
  state.current_task = taskName;
  saveState(join(dir, ".state.loop"), state);
}

function runLoopList(invocation: Invocation): Answer {
  const loops = listLoops(invocation.project);
  const json = {
    loops: loops.map((view) => ({ ...summarizeLoop(view), ...describeLoopNow(view) })),
  };
  if (loops.length === 0) {
    return { json, text: "no loops", hint: "status --create-loop NAME --from-template TEMPLATE" };
  }
  const rows = loops.map((view) => {
    const { name, state } = view;
    if (state === null) return [name, "broken", "-", "-", "-", view.problem];
    const scores = state.score_history.map((score) => score.toFixed(2)).join(" ") || "-";
    const wake = lastWake(view);
    const woke = wake === null ? "never woke" : `woke ${describeAge(Date.now() - wake)}`;
    return [
      name,
      describeStatus(state),
      `${state.iteration_count}`,
      scores,
      state.current_task ?? "-",
      woke,
    ];
  });
  return {
    json,
    text: renderTable([["LOOP", "STATUS", "TICKS", "SCORES", "TASK", "LAST WAKE"], ...rows])
      .trimEnd(),
  };
}

function describeLoopNow(view: LoopView): Record<string, unknown> {
  const wake = lastWake(view);
  return {
    current_task: view.state?.current_task ?? null,
    resumed_count: view.state?.resumed_count ?? null,
    score_history: view.state?.score_history ?? [],
    last_wake_at: wake === null ? null : new Date(wake).toISOString(),
    problem: view.state === null ? view.problem : null,
  };
}

async function runLoopLog(invocation: Invocation): Promise<Answer> {
  const dir = findLoopDir(invocation.project, readText(invocation, "loop-log"));
  const count = readWholeNumber(invocation.given, "lines", { min: 1, max: 1_000_000 }) ??
    DEFAULT_LOG_LINES;
  const path = join(dir, ".state.log");
  const older = readTextIfPresent(`${path}.1`) ?? "";
  const lines = (older + (readTextIfPresent(path) ?? "")).split("\n").filter((line) => line !== "")
    .slice(-count);
  if (invocation.given.has("follow")) {
    for (const line of lines) console.log(line);
    await followLog(path);
  }
  return { json: { lines }, text: lines.length === 0 ? "the log is empty" : lines.join("\n") };
}

/** Prints what is appended to a log, also across its rotation, until the process is ended. */
async function followLog(path: string): Promise<never> {
  let [offset, inode] = [fileSize(path), statInode(path)];
  while (true) {
    await sleep(500);
    if (statInode(path) !== inode) [offset, inode] = [0, statInode(path)];
    if (fileSize(path) <= offset) continue;
    const text = (readTextIfPresent(path) ?? "").slice(0);
    const bytes = new TextEncoder().encode(text);
    Deno.stdout.writeSync(bytes.subarray(offset));
    offset = bytes.length;
  }
}

function statInode(path: string): number | null {
  try {
    return Deno.statSync(path).ino;
  } catch {
    return null; // Between two files of a rotation.
  }
}

// --- Command table ---

/** Options that go with commands. */
// deno-fmt-ignore -- a table: one row a line.
export const OPTIONS: readonly OptionSpec[] = [
  { name: "project", value: "DIR", help: "the project (default: AUTOMATON_PROJECT, else found from here)" },
  { name: "title", value: "TEXT", help: "a task's title" },
  { name: "phase", value: "PHASE", help: "the phase a task starts in (from implement on: counts as approved)" },
  { name: "reason", value: "TEXT", help: "why (a step back, a halt)" },
  { name: "detail", value: "TEXT", help: "more words for the log of a halt" },
  { name: "session", value: "ID", help: "who claims a task" },
  { name: "file", value: "PATH", help: "the file that is asked about" },
  { name: "loop", value: "NAME", help: "the loop that is meant" },
  { name: "loop-worktree", help: "the file lies in the loop's own worktree" },
  { name: "stalled-days", value: "N", help: `idle days after which a task counts as stalled (${DEFAULT_STALLED_DAYS})` },
  { name: "from-template", value: "NAME", help: "a folder of templates/loops/" },
  { name: "no-worktree", help: "let the loop work in the project itself" },
  { name: "force", help: "lose uncommitted changes" },
  { name: "purge", help: "remove logs and outputs too" },
  { name: "now", help: "end the running harness instead of waiting for it" },
  { name: "lines", value: "N", help: `how many log lines (${DEFAULT_LOG_LINES})` },
  { name: "follow", help: "go on printing lines as they come" },
  { name: "dry-run", help: "answer without changing anything" },
  { name: "lock-timeout", value: "S", help: `seconds to wait for a tick (${DEFAULT_LOCK_TIMEOUT_S})` },
  { name: "json", help: "one line of JSON, the last of stdout" },
  { name: "help", help: "this text" },
  { name: "version", help: "the framework's version" },
];

/** Commands, in the order of `--help`. */
// deno-fmt-ignore -- a table: one row a line.
export const COMMANDS: readonly Command[] = [
  { name: "create-task", value: "NAME", group: "Tasks", help: "make a task", takes: ["title", "phase"], writes: true, creates: true, run: runCreateTask },
  { name: "transition", value: "PHASE", group: "Tasks", help: "move a task to a phase", takes: ["task", "reason"], needs: ["task"], writes: true, run: runTransition },
  { name: "approve", group: "Tasks", help: "a person's approval of a --task, or of a halted --loop", takes: ["task", "loop", "lock-timeout"], writes: true, run: runApprove },
  { name: "claim", group: "Tasks", help: "reserve a task for a session", takes: ["task", "session"], needs: ["task", "session"], writes: true, run: runClaim },
  { name: "release", group: "Tasks", help: "give a task back", takes: ["task"], needs: ["task"], writes: true, run: runRelease },
  { name: "can-edit", group: "Tasks", help: "may a file be edited now (exit 0) or not (1)", takes: ["task", "file", "loop", "loop-worktree"], writes: false, run: runCanEdit },
  { name: "scope-check", group: "Tasks", help: "files changed outside the scope of a --task or --loop (exit 1 if any)", takes: ["task", "loop"], writes: false, run: runScopeCheck },
  { name: "audit", group: "Tasks", help: "what is wrong with tasks and loops", takes: ["stalled-days"], writes: false, run: runAudit },
  { name: "create-loop", value: "NAME", group: "Loops", help: "make a loop", takes: ["from-template", "no-worktree", "task"], needs: ["from-template"], writes: true, creates: true, run: runCreateLoop },
  { name: "remove-loop", value: "NAME", group: "Loops", help: "take a loop away; its branch and logs stay", takes: ["force", "purge", "lock-timeout"], writes: true, run: runRemoveLoop },
  { name: "pause-loop", value: "NAME", group: "Loops", help: "stop ticking (a running tick: before its next role)", takes: ["now"], writes: true, run: runPauseLoop },
  { name: "resume-loop", value: "NAME", group: "Loops", help: "tick again after a pause", takes: ["lock-timeout"], writes: true, run: runResumeLoop },
  { name: "halt-loop", value: "NAME", group: "Loops", help: "trip the brake by hand", takes: ["reason", "detail", "lock-timeout"], needs: ["reason"], writes: true, run: runHaltLoop },
  { name: "can-continue", value: "NAME", group: "Loops", help: "OK, HALTED, PAUSED or COMPLETE", takes: [], writes: false, run: runCanContinue },
  { name: "check-gate", value: "NAME", group: "Loops", help: "apply the brakes as before a tick", takes: ["task", "dry-run", "lock-timeout"], writes: true, run: runGateCommand },
  { name: "claim-loop-task", value: "NAME", group: "Loops", help: "make a --task the loop's own", takes: ["task", "lock-timeout"], needs: ["task"], writes: true, run: runClaimLoopTask },
  { name: "loop-list", group: "Loops", help: "all loops and how they are", takes: [], writes: false, run: runLoopList },
  { name: "loop-log", value: "NAME", group: "Loops", help: "the last lines of a loop's log", takes: ["lines", "follow"], writes: false, run: runLoopLog },
  // Last: --task is an option of the others, and a command where none of them is given.
  { name: "task", value: "NAME", group: "Tasks", help: "show a task (or name one for another command)", takes: [], writes: false, run: runShowTask },
];

const COMMON_OPTIONS = ["project", "json"];

/** The text of `--help`, from the two tables. */
export function renderHelp(): string {
  const groups = (["Tasks", "Loops"] as const).map((group) =>
    `${group}:\n${renderOptions(COMMANDS.filter((command) => command.group === group))}`
  );
  return `status: the task pipeline and the brakes of loops

Usage: status COMMAND [OPTION ...]

${groups.join("\n")}
Options:
${renderOptions(OPTIONS)}`;
}

/** Finds the one command of a command line, and refuses options that do not go with it. */
export function selectCommand(given: ReadonlyMap<string, string | true>): Command {
  const named = COMMANDS.filter(({ name }) => given.has(name) && name !== "task");
  if (named.length > 1) {
    throw new UsageError(
      `Cannot run "--${named[0]!.name}" and "--${named[1]!.name}" at once: give one command`,
    );
  }
  const command = named[0] ?? COMMANDS.find(({ name }) => name === "task" && given.has(name));
  if (command === undefined) throw new UsageError("Cannot run without a command: see --help");
  const fitting = [command.name, ...command.takes, ...COMMON_OPTIONS];
  for (const name of given.keys()) {
    if (!fitting.includes(name)) {
      throw new UsageError(`Cannot use "--${name}" with "--${command.name}"`);
    }
  }
  const missing = command.needs?.find((name) => !given.has(name));
  if (missing !== undefined) {
    throw new UsageError(`Cannot run "--${command.name}": "--${missing}" is missing`);
  }
  return command;
}

/** Refuses what a harness's role may not do; refusals go to the loop's log. */
function guardRole(
  command: Command,
  given: ReadonlyMap<string, string | true>,
  project: string,
): void {
  const role = readEnv("AUTOMATON_ROLE");
  if (role === undefined || !command.writes) return;
  const task = readEnv("AUTOMATON_TASK");
  const isOwnStep = command.name === "transition" &&
    (task === undefined || given.get("task") === task);
  if (role === "orchestrate" && isOwnStep) return;
  const allowed = role === "orchestrate"
    ? `one --transition of task ${task ?? "NAME"}`
    : "no command that writes";
  const message = `Cannot run "--${command.name}" as ${role}: this role may run ${allowed}`;
  const loop = readEnv("AUTOMATON_LOOP");
  if (loop !== undefined && NAME_PATTERN.test(loop)) {
    const dir = join(loopsDir(project), loop);
    if (isDirectory(dir)) logEvent(dir, "WARNING", "REFUSED", { message });
  }
  throw new RefusedError(message);
}

// --- Main ---

/** Runs one command line; returns the exit code. */
export async function main(args: readonly string[]): Promise<number> {
  try {
    const given = parseCommandLine(args, [...COMMANDS, ...OPTIONS]);
    const framework = findFrameworkDir(import.meta.url);
    if (given.has("help")) {
      console.log(renderHelp().trimEnd());
      return 0;
    }
    if (given.has("version")) {
      console.log(`status ${readVersion(framework)}`);
      return 0;
    }
    const command = selectCommand(given);
    clearGitEnvironment();
    const flag = given.get("project");
    const project = findProjectDir(
      flag === undefined ? undefined : `${flag}`,
      command.creates === true,
    );
    guardRole(command, given, project);
    const answer = await command.run({ given, framework, project });
    if (!given.has("json") || args.includes("--follow")) console.log(answer.text);
    if (answer.hint !== undefined) console.error(`hint: ${answer.hint}`);
    if (given.has("json")) console.log(JSON.stringify({ schema_version: 1, ...answer.json }));
    return answer.exitCode ?? 0;
  } catch (error) {
    return reportFailure(error, "status", args);
  }
}

if (import.meta.main) Deno.exit(await main(Deno.args));
