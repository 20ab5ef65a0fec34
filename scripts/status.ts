#!/usr/bin/env -S deno run -q --no-prompt -P=status
/**
 * The task pipeline, and the only place where its rules are enforced.
 *
 * Tasks move through phases, each with a document to leave behind; a person approves what only a
 * person may approve. Loops have brakes, which `--check-gate` applies before every tick. Commands and
 * options are listed by `--help`, from the tables at the end of this file.
 *
 * Files below `<project>/.automaton/`: `models.json`; `tasks/<task>/` with `.state`, `.state.bak`,
 * `.state.lock` and the documents; `loops/<name>/` with `loop.json`, `cost.json`, `.state.loop` and its
 * copies, `.state.log` and its rotations, `.state.lock`, `pause.request`, `schedule.json`, the script that
 * a scheduler starts, and `worktree/`. Elsewhere only the units of a person's own scheduler are written.
 * Of the framework `config.md`, `models.json` and `templates/` are read.
 *
 * Environment: AUTOMATON_HOME (framework), AUTOMATON_PROJECT (project), AUTOMATON_NO_LOOP_LOCK=1 (the
 * caller holds the loop's lock), what a tick gives its harness (AUTOMATON_LOOP, AUTOMATON_ROLE,
 * AUTOMATON_TASK, AUTOMATON_OP_FILE), from which the role guard decides, AUTOMATON_PLATFORM (the
 * scheduler's platform, for tests), and for schedules HOME, PATH, the user's name and
 * AUTOMATON_CONTEXT_TOKENS, which a schedule takes along.
 *
 * Permissions: read and write (a project may lie anywhere), run (git, the scheduler's tools, a loop's
 * hooks), env (the names above), sys (the host's name, the user's id). No network.
 *
 * Exit codes: 0 done, or a gate that says no; 1 refused or failed; 2 usage.
 *
 * @module
 */

import { parseArgs } from "@std/cli";
import { copySync, ensureDirSync, existsSync } from "@std/fs";
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
const FOLLOW_INTERVAL_MS = 200;
const HALT_HOOK_TIMEOUT_MS = 60_000;
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
export interface Invocation {
  readonly given: ReadonlyMap<string, string | true>;
  readonly framework: string;
  readonly project: string;
}

type ProjectPlace = Pick<Invocation, "framework" | "project">;

/** What a command answers: one object for `--json`, else text; a hint where the answer is no. */
export interface Answer {
  readonly json: Readonly<Record<string, unknown>>;
  readonly text: string;
  readonly hint?: string;
  readonly exitCode?: 0 | 1;
}

/** One command of the table: its flag, what goes with it, whether it writes. */
export interface Command extends OptionSpec {
  readonly group: "Tasks" | "Loops";
  /** Options that the command takes, besides those that all take. */
  readonly takes: readonly string[];
  /** Of those, the ones without which it cannot run. */
  readonly needs?: readonly string[];
  readonly writes: boolean;
  /** True where the command makes `.automaton/` in a project named outright. */
  readonly creates?: true;
  /** True where the command makes sense outside of any project. */
  readonly anywhere?: true;
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
 * A phase's place in the pipeline; -1 for human_intervention and for what is no phase.
 *
 * @example
 * ```ts
 * import { phaseIndex } from "./status.ts";
 * if (phaseIndex("design") !== 1 || phaseIndex("human_intervention") !== -1) throw new Error("index");
 * ```
 */
export function phaseIndex(phase: string): number {
  return (PHASES as readonly string[]).indexOf(phase);
}

function nextPhase(phase: string): string | null {
  return phaseIndex(phase) < 0 ? null : PHASES[phaseIndex(phase) + 1] ?? null;
}

function isKnownPhase(phase: string): boolean {
  return phase === WAITING_PHASE || phaseIndex(phase) >= 0;
}

/**
 * True when scores are flat or only falling over a whole window and none of those ticks passed.
 *
 * @param passes Beside the scores; an absent entry counts as not passed.
 *
 * @example
 * ```ts
 * import { isPlateau } from "./status.ts";
 * if (!isPlateau([0.9, 0.5, 0.5], [], 2) || isPlateau([0.5, 0.5], [false, true], 2)) throw new Error();
 * ```
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

/**
 * Why a task may not take a step, or null when it may.
 *
 * @param hasDocument Whether the phase being left has its document.
 * @param reason The reason given for the step; null for none.
 *
 * @example
 * ```ts
 * import { refuseStep } from "./status.ts";
 * const task = { name: "a", phase: "spec", approved_at: null };
 * const refusal = refuseStep(task, "implement", { hasDocument: true, reason: null });
 * if (refusal?.hint !== "status --approve --task a") throw new Error("not refused");
 * ```
 */
export function refuseStep(
  task: Pick<TaskState, "name" | "phase" | "approved_at">,
  target: string,
  { hasDocument, reason }: { hasDocument: boolean; reason: string | null },
): RefusedError | null {
  const { name, phase } = task;
  const refuse = (why: string, hint: string) =>
    new RefusedError(`Cannot move task "${name}" from ${phase} to ${target}: ${why}`, hint);
  const approval = `status --approve --task ${name}`;
  if (target === phase) return refuse("it is there already", `status --task ${name}`);
  if (phase === WAITING_PHASE) return refuse("it waits for a person", approval);
  if (!isKnownPhase(phase)) return refuse("its phase is unknown", "status --audit");
  const steps = phaseIndex(target) - phaseIndex(phase);
  if (target === WAITING_PHASE || steps < 0) {
    const isRework = target === "implement" && (phase === "code_review" || phase === "bug_hunt");
    if (isRework || reason !== null) return null;
    return refuse("such a step needs a reason", "add --reason TEXT");
  }
  if (steps > 1) {
    const next = nextPhase(phase);
    return refuse(`the next phase is ${next}`, `status --transition ${next} --task ${name}`);
  }
  const document = PHASE_DOCUMENTS[phase];
  if (!hasDocument) return refuse(`${document} is missing or empty`, `write ${document} first`);
  if (phase === "spec" && task.approved_at === null) {
    return refuse("no person has approved it", approval);
  }
  return null;
}

/** Splits git's NUL-separated output; file names may hold anything else, newlines too. */
function splitNul(bytes: Uint8Array): string[] {
  const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
  return text.split("\0").filter((item) => item !== "");
}

/** Lets a text do nothing to a terminal: what agents write into files may hold escape sequences. */
function escapeControls(text: string): string {
  return text.replace(
    /[\p{Cc}--[\t\n\r]]/gv,
    (control) => `\\u${control.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

function countWords(count: number, word: string): string {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** How long ago something was, in the largest fitting unit. */
function describeAge(milliseconds: number): string {
  const minutes = Math.floor(milliseconds / 60_000);
  if (minutes < 1) return "just now";
  if (minutes < 120) return `${minutes} min ago`;
  if (minutes < 2 * 24 * 60) return `${Math.floor(minutes / 60)} h ago`;
  return `${Math.floor(minutes / (24 * 60))} days ago`;
}

/** Lays out rows as columns as wide as their widest cell. */
function renderColumns(rows: readonly (readonly string[])[]): string {
  const widths: number[] = [];
  for (const row of rows) {
    row.forEach((cell, index) => widths[index] = Math.max(widths[index] ?? 0, cell.length));
  }
  const renderRow = (row: readonly string[]) =>
    row.map((cell, index) => cell.padEnd(widths[index]!)).join("  ").trimEnd();
  return rows.map(renderRow).join("\n");
}

/** A path below a folder, with `/`; null when it lies elsewhere. */
function pathBelow(folder: string, path: string): string | null {
  const inner = relative(folder, path);
  if (inner === ".." || /^\.\.[/\\]/.test(inner) || isAbsolute(inner)) return null;
  return inner.replaceAll("\\", "/");
}

function describeStatus(state: LoopState): string {
  return state.status === "halted" ? `halted (${state.halt_reason ?? "unknown"})` : state.status;
}

/** What a person does about a loop that does not run. */
function hintForStandstill(name: string, { status }: LoopState): string {
  if (status === "halted") return `status --loop-log ${name}, then status --approve --loop ${name}`;
  if (status === "paused") return `status --resume-loop ${name}`;
  return `status --loop-log ${name} shows what it did`;
}

// --- Parsing ---

const isTime = (value: unknown): boolean => value !== null && isTimeOrNull(value);
const isTaskStep = (step: unknown): boolean =>
  isRecord(step) && isTime(step.at) && isTextOrNull(step.from) && isText(step.to) &&
  isText(step.by) && isTextOrNull(step.reason);

// deno-fmt-ignore -- a table: one row a line.
const TASK_STATE_RULES: readonly FieldRule[] = [
  ["name", "a task's name", (value) => value !== null && isNameOrNull(value), "required"],
  ["title", "a text", isText, "required"],
  ["phase", "a phase", isText, "required"],
  ["previous_phase", "a phase or null", isTextOrNull, "required"],
  ["created_at", "a time", isTime, "required"],
  ["updated_at", "a time", isTime, "required"],
  ["approved_at", "a time or null", isTimeOrNull, "required"],
  ["claimed_by", "a session or null", isTextOrNull, "required"],
  ["loop", "a loop's name or null", isNameOrNull, "required"],
  ["history", "a list of steps, each with at, from, to, by and reason", isListOf(isTaskStep), "required"],
];

/**
 * Parses the text of a task's `.state`. An unknown phase is a finding of the audit, not an error here.
 *
 * @throws {SyntaxError|TypeError|NewerSchemaError} Names the file and the field.
 *
 * @example
 * ```ts
 * import { parseTaskState } from "./status.ts";
 * let message = "";
 * try {
 *   parseTaskState('{"schema_version": 1, "name": "../etc"}', "a/.state");
 * } catch (error) {
 *   message = (error as Error).message;
 * }
 * if (!message.includes("field name")) throw new Error(message);
 * ```
 */
export function parseTaskState(text: string, where: string): TaskState {
  const parsed = parseJsonText(text, where);
  checkSchemaVersion(parsed, where);
  checkFields(parsed, TASK_STATE_RULES, where);
  return parsed as unknown as TaskState;
}

/** What contradicts itself in a task's history; null when it is possible. */
function findImpossibleHistory(task: TaskState): string | null {
  let at: string | null = null;
  let reached: string | null = null; // A wait for a person leads on from the phase before it.
  for (const { from, to } of task.history) {
    if (from !== at) return `a step leaves ${from} where the task was in ${at}`;
    if (!isKnownPhase(to)) return `a step leads to the unknown phase "${to}"`;
    if (reached !== null && phaseIndex(to) > phaseIndex(reached) + 1) {
      return `a step leaps from ${reached} to ${to}`;
    }
    if (to !== WAITING_PHASE) reached = to;
    at = to;
  }
  if (task.history.length > 0 && at !== task.phase) {
    return `its history ends in ${at}, not in ${task.phase}`;
  }
  if (phaseIndex(task.phase) >= phaseIndex("implement") && task.approved_at === null) {
    return `it is in ${task.phase} without a person's approval`;
  }
  return null;
}

/** The phases that a task has behind it, from the one it was created in. */
function listPhasesBehind(task: TaskState): readonly string[] {
  const phase = task.phase === WAITING_PHASE ? task.previous_phase ?? "" : task.phase;
  const created = task.history[0]?.to ?? "research";
  const [start, end] = [phaseIndex(created), phaseIndex(phase)];
  return start < 0 || end < 0 ? [] : PHASES.slice(start, end);
}

function checkName(kind: string, name: string): string {
  if (NAME_PATTERN.test(name)) return name;
  throw new UsageError(
    `Cannot use ${kind} name "${name}": it must be 1 to 63 of a-z, 0-9 and -, not starting with -`,
  );
}

function optionalText({ given }: Invocation, name: string): string | null {
  const value = given.get(name);
  return typeof value === "string" ? value : null;
}

function readText(invocation: Invocation, name: string): string {
  const value = optionalText(invocation, name);
  if (value === null) throw new UsageError(`Cannot run without flag "--${name}": it is missing`);
  return value;
}

/** A free text that ends up in a state file: one line, of a length that fits a screen. */
function optionalLine(invocation: Invocation, name: string): string | null {
  const value = optionalText(invocation, name);
  if (value !== null && (/\p{Cc}/u.test(value) || value.length > 2000)) {
    throw new UsageError(
      `Cannot use flag "--${name}": it must be one line of at most 2000 characters`,
    );
  }
  return value;
}

/** A word that must be one of a list. */
function checkWord<T extends string>(flag: string, word: string, known: readonly T[]): T {
  const found = known.find((each) => each === word);
  if (found !== undefined) return found;
  const nearest = findNearest(word, known);
  const advice = nearest === null ? "" : ` (did you mean ${nearest}?)`;
  throw new UsageError(
    `Cannot use "${word}" for flag "--${flag}": it is none of ${known.join(", ")}${advice}`,
  );
}

// --- Files and processes ---

const automatonDir = (project: string) => join(project, ".automaton");
const tasksDir = (project: string) => join(automatonDir(project), "tasks");
const loopsDir = (project: string) => join(automatonDir(project), "loops");
const pauseRequestPath = (dir: string) => join(dir, "pause.request");

/** Who acts: a person, or a loop and the role in it. */
function describeActor(): string {
  const loop = readEnv("AUTOMATON_LOOP");
  const role = readEnv("AUTOMATON_ROLE");
  if (loop === undefined && role === undefined) return "person";
  return `loop:${loop ?? "?"}${role === undefined ? "" : `/${role}`}`;
}

/** True when a document is there and holds more than white space (or the NULs of a power loss). */
function isDocumentWritten(path: string): boolean {
  try {
    const { isFile, size } = Deno.statSync(path);
    if (!isFile || size === 0) return false;
    // No blank page is that long, and reading it whole would cost memory.
    return size > 65_536 || /[^\s\0]/.test(Deno.readTextFileSync(path));
  } catch {
    return false; // Missing or out of reach: there is no document.
  }
}

/**
 * Reads a state file that its caller has locked and is about to change. A damaged one is kept as
 * `<file>.bad-<time>` and its `.bak` takes its place.
 *
 * @returns The state, and what was wrong with the file where it was restored.
 * @throws {RefusedError} Where there is no file, or a newer edition wrote it.
 * @throws {StateLostError} Where neither can be read; nothing was changed.
 */
function loadState<T>(
  path: string,
  parse: (text: string, where: string) => T,
): { state: T; problem: string | null } {
  try {
    return { state: readState(path, parse), problem: null };
  } catch (error) {
    if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
    let [copy, state]: [string, T | null] = ["", null];
    try {
      copy = readTextIfPresent(`${path}.bak`) ?? "";
      state = parse(copy, `${path}.bak`);
    } catch (copyError) {
      if (copyError instanceof NewerSchemaError) throw copyError;
      throw new StateLostError(error.message); // What is wrong with the copy adds nothing to do.
    }
    keepDamaged(path);
    writeFileAtomic(path, copy);
    console.error(`warning: ${error.message}; restored from ${path}.bak`);
    return { state, problem: error.message };
  }
}

/** Reads a state file as it is, without repairing anything. */
function readState<T>(path: string, parse: (text: string, where: string) => T): T {
  const text = readTextIfPresent(path);
  if (text !== null) return parse(text, path);
  throw new RefusedError(`Cannot open "${path}": no such file (untracked)`, "status --audit");
}

/** Keeps a damaged state file before anything takes its place: as a copy, or what is no file itself. */
function keepDamaged(path: string): void {
  const kept = `${path}.bad-${new Date().toISOString().replace(/[-:.]/g, "")}`;
  if (Deno.lstatSync(path).isFile) Deno.copyFileSync(path, kept);
  else Deno.renameSync(path, kept);
}

/** Removes whatever has a name, also where an agent made a folder of it. */
function removeIfPresent(path: string): void {
  try {
    Deno.removeSync(path, { recursive: true });
  } catch (error) {
    if (!(error instanceof Deno.errors.NotFound)) throw error;
  }
}

/** The names in a folder that lead to folders, sorted; none when it is missing. */
function listFolders(path: string): string[] {
  try {
    const entries = [...Deno.readDirSync(path)];
    return entries
      .filter(({ name, isDirectory: isFolder, isSymlink }) =>
        isFolder || (isSymlink && isDirectory(join(path, name)))
      )
      .map(({ name }) => name)
      .sort();
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return [];
    throw error;
  }
}

function listNames(path: string): string[] {
  return [...Deno.readDirSync(path)].map(({ name }) => name).sort();
}

/** A task's folder, in tasks/ or in tasks/complete/; null when there is none. */
function findTaskDir(project: string, name: string): string | null {
  const candidates = [join(tasksDir(project), name), join(tasksDir(project), "complete", name)];
  if (name === "complete") candidates.shift();
  return candidates.find(isDirectory) ?? null;
}

/** The folder of a tracked task; its state may be damaged. */
function requireTaskDir(project: string, name: string): string {
  const dir = findTaskDir(project, checkName("task", name));
  if (dir === null) {
    throw new RefusedError(
      `Cannot open task "${name}": there is none in ${tasksDir(project)}`,
      `status --create-task ${name}`,
    );
  }
  if (existsSync(join(dir, ".state"))) return dir;
  throw new RefusedError(
    `Cannot use task "${name}": it has no .state (untracked)`,
    `move ${dir} aside, run status --create-task ${name}, and move its documents back`,
  );
}

/** Reads a task without its lock. */
function readTask(project: string, name: string): { dir: string; task: TaskState } {
  const dir = requireTaskDir(project, name);
  return { dir, task: readState(join(dir, ".state"), parseTaskState) };
}

function readTaskOrNull(project: string, name: string): TaskState | null {
  try {
    return readTask(project, name).task;
  } catch {
    return null; // The audit tells what is wrong with it.
  }
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
  const { dir, lock } = await lockTask(project, name);
  try {
    const path = join(dir, ".state");
    const { state: task } = loadState(path, parseTaskState);
    change(task, dir);
    const place = findPlace(project, task, dir);
    task.updated_at = new Date().toISOString();
    saveState(path, task);
    if (place !== dir) moveFolder(dir, place);
    return { dir: place, task };
  } catch (error) {
    if (!(error instanceof StateLostError)) throw error;
    throw new RefusedError(error.message, `repair ${join(dir, ".state")} by hand, or remove it`);
  } finally {
    lock.close();
  }
}

/** Locks a task where it is: another command may move its folder while this one waits. */
async function lockTask(
  project: string,
  name: string,
): Promise<{ dir: string; lock: Deno.FsFile }> {
  while (true) {
    const dir = requireTaskDir(project, name);
    try {
      const lock = await acquireLock(join(dir, ".state.lock"), DEFAULT_LOCK_TIMEOUT_S * 1000);
      if (lock !== null) return { dir, lock };
    } catch (error) {
      // Moved meanwhile; else the lock file itself leads nowhere.
      if (error instanceof Deno.errors.NotFound && findTaskDir(project, name) !== dir) continue;
      throw error;
    }
    throw new RefusedError(
      `Cannot lock task "${name}": another command has held it for ${DEFAULT_LOCK_TIMEOUT_S} s`,
      "try again; it lasts only where a process hangs",
    );
  }
}

/** Where a task belongs: finished ones in tasks/complete/, all others in tasks/. */
function findPlace(project: string, { phase }: TaskState, dir: string): string {
  const parent = phase === "complete" ? join(tasksDir(project), "complete") : tasksDir(project);
  const place = join(parent, basename(dir));
  if (place !== dir && existsSync(place)) {
    throw new RefusedError(`Cannot move "${dir}": ${place} exists`, "move one of them aside");
  }
  return place;
}

function moveFolder(from: string, to: string): void {
  ensureDirSync(dirname(to));
  Deno.renameSync(from, to);
  syncDirectory(dirname(to));
  syncDirectory(dirname(from));
}

/** Makes a folder that appears with its content or not at all; a second maker loses the race. */
function createFolderWhole(place: string, fill: (dir: string) => void): void {
  ensureDirSync(dirname(place));
  const making = join(dirname(place), `.${basename(place)}.${crypto.randomUUID()}`);
  Deno.mkdirSync(making);
  try {
    fill(making);
    moveFolder(making, place);
  } catch (error) {
    removeIfPresent(making);
    if (!existsSync(place)) throw error;
    throw new RefusedError(`Cannot create "${place}": another command just did`, "status --audit");
  }
}

/** A loop's folder counts as one when it holds a state or a configuration (not only old logs). */
function isLoopDir(dir: string): boolean {
  return isDirectory(dir) &&
    (existsSync(join(dir, ".state.loop")) || existsSync(join(dir, "loop.json")));
}

function findLoopDir(project: string, name: string): string {
  const dir = join(loopsDir(project), checkName("loop", name));
  if (isLoopDir(dir)) return dir;
  throw new RefusedError(
    `Cannot open loop "${name}": there is none in ${loopsDir(project)}`,
    `status --create-loop ${name} --from-template TEMPLATE`,
  );
}

const readLoopState = (dir: string): LoopState =>
  readState(join(dir, ".state.loop"), parseLoopState);

const saveLoopState = (dir: string, state: LoopState): void =>
  saveState(join(dir, ".state.loop"), state);

/** Looks at a loop without its lock and without repairing anything. */
function viewLoop(project: string, name: string): LoopView {
  const dir = join(loopsDir(project), name);
  try {
    return { name, dir, state: readLoopState(dir) };
  } catch (error) {
    return { name, dir, state: null, problem: (error as Error).message };
  }
}

function listLoopNames(project: string): string[] {
  return listFolders(loopsDir(project))
    .filter((name) => NAME_PATTERN.test(name) && isLoopDir(join(loopsDir(project), name)));
}

function listLoops(project: string): LoopView[] {
  return listLoopNames(project).map((name) => viewLoop(project, name));
}

/** The halted loop that owns a task or has it as its current one; null where there is none. */
function findHaltedOwner(project: string, task: TaskState): string | null {
  const owner = listLoops(project).find(({ name, state }) =>
    state?.status === "halted" && (task.loop === name || state.current_task === task.name)
  );
  return owner?.name ?? null;
}

function readLoopConfig(dir: string): LoopConfig {
  const path = join(dir, "loop.json");
  const text = readTextIfPresent(path);
  if (text !== null) return parseLoopConfig(text, path).config;
  throw new RefusedError(
    `Cannot open "${path}": no such file`,
    `copy one from a template, or status --remove-loop ${basename(dir)}`,
  );
}

/** Appends to a loop's log; a log that cannot be written must not stop a brake. */
function logEvent(
  dir: string,
  level: "INFO" | "WARNING" | "ERROR",
  event: string,
  fields: Readonly<Record<string, unknown>> = {},
): void {
  try {
    appendLog(dir, level, event, { by: describeActor(), ...fields });
  } catch (error) {
    const problem = (error as Error).message;
    console.error(`warning: Cannot write "${join(dir, ".state.log")}": ${problem}`);
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
  findDir = findLoopDir,
): Promise<T> {
  const dir = findDir(invocation.project, name);
  if (readEnv("AUTOMATON_NO_LOOP_LOCK") === "1") return await change(dir);
  const path = join(dir, ".state.lock");
  let lock: Deno.FsFile | null;
  try {
    lock = await acquireLock(path, readLockTimeoutMs(invocation.given));
  } catch (error) {
    findDir(invocation.project, name); // Says so where the loop was removed in the meantime.
    throw error;
  }
  if (lock === null) throw await makeLockRefusal(name, path);
  try {
    return await change(dir);
  } finally {
    lock.close();
  }
}

/** How long a command waits for a loop's lock. */
function readLockTimeoutMs(given: ReadonlyMap<string, string | true>): number {
  const timeoutS = readWholeNumber(given, "lock-timeout", { min: 0, max: 86_400 });
  return (timeoutS ?? DEFAULT_LOCK_TIMEOUT_S) * 1000;
}

async function makeLockRefusal(name: string, lockPath: string): Promise<RefusedError> {
  const tick = await findTick(lockPath);
  if (tick === null) {
    return new RefusedError(
      `Cannot lock loop "${name}": another command holds it`,
      "try again; it lasts only where a process hangs",
    );
  }
  const { pid, host, started_at } = tick;
  return new RefusedError(
    `Cannot lock loop "${name}": a tick (process ${pid} on ${host}) holds it since ${started_at}`,
    `wait for its end, or end it with status --pause-loop ${name} --now`,
  );
}

/** The tick that holds a lock; null for another command, in whose lock an earlier tick left its note. */
async function findTick(lockPath: string): Promise<LockNote | null> {
  const note = readLockNote(lockPath);
  if (note === null || note.host !== Deno.hostname()) return note;
  const probe = ["sh", "-c", 'kill -0 "$1" 2>/dev/null', "sh", `${note.pid}`];
  return (await runCommand(probe)).code === 0 ? note : null;
}

/** Reads a loop's state to change it; one that is lost halts the loop for a person to look at. */
async function loadLoopState(place: ProjectPlace, dir: string): Promise<LoopState> {
  try {
    const { state, problem } = loadState(join(dir, ".state.loop"), parseLoopState);
    if (problem !== null) logEvent(dir, "ERROR", "STATE_RESTORED", { message: problem });
    return state;
  } catch (error) {
    if (!(error instanceof StateLostError)) throw error;
    const state = rebuildLoopState(dir);
    keepDamaged(join(dir, ".state.loop"));
    const copy = join(dir, ".state.loop.bak");
    if (isDirectory(copy)) keepDamaged(copy); // No save could take its place.
    console.error(`warning: ${error.message}; the loop is halted for a person to look at`);
    const trip: GateTrip = { haltReason: "human_intervention", detail: error.message };
    await haltLoop(place, dir, { state, trip });
    return state;
  }
}

/** A state in the place of a lost one; counters go on from the log, never from zero. */
function rebuildLoopState(dir: string): LoopState {
  const state = makeLoopState(basename(dir));
  for (const path of listLogs(dir)) {
    const text = readLogOrNothing(path);
    for (const [, key, digits] of text.matchAll(/"(iteration_count|resumed_count)":(\d{1,9})/g)) {
      const field = key as "iteration_count" | "resumed_count";
      state[field] = Math.max(state[field], Number(digits));
    }
  }
  return state;
}

function readLogOrNothing(path: string): string {
  try {
    return readTextIfPresent(path) ?? "";
  } catch (error) {
    console.error(`warning: ${(error as Error).message}; no counter is taken from it`);
    return ""; // A halt must not wait for a log.
  }
}

/** A loop's log files, the newest first. */
function listLogs(dir: string): string[] {
  return ["", ".1", ".2", ".3"].map((suffix) => join(dir, `.state.log${suffix}`))
    .filter((path) => existsSync(path));
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

/** Halts a loop: state and log line; a halt that was there already keeps its reason. */
async function haltLoop(
  place: ProjectPlace,
  dir: string,
  { state, trip }: { state: LoopState; trip: GateTrip },
): Promise<void> {
  if (state.status === "halted") return;
  state.status = "halted";
  state.halt_reason = trip.haltReason;
  saveLoopState(dir, state);
  const { iteration_count, resumed_count } = state;
  const fields = {
    halt_reason: trip.haltReason,
    detail: trip.detail,
    iteration_count,
    resumed_count,
  };
  logEvent(dir, "WARNING", "HALTED", fields);
  await switchSchedule(dir, "pause");
  await runHaltHook(place, dir, trip);
}

/** Tells the loop's own command of a halt; whatever becomes of it, the halt stands. */
async function runHaltHook(
  { project, framework }: ProjectPlace,
  dir: string,
  { haltReason, detail }: GateTrip,
): Promise<void> {
  const config = readConfigOrNull(dir);
  const argv = config?.hooks?.on_halt;
  if (argv === undefined) return;
  const sessionMs = (config?.harness?.timeout_seconds || Infinity) * 1000;
  const env = {
    AUTOMATON_HOME: framework,
    AUTOMATON_PROJECT: project,
    AUTOMATON_LOOP: basename(dir),
    // What an agent may have written must not approve anything by way of a hook.
    AUTOMATON_ROLE: "verify",
    AUTOMATON_NO_LOOP_LOCK: "",
    AUTOMATON_EVENT: "halt",
    AUTOMATON_REASON: haltReason,
    AUTOMATON_DETAIL: detail,
  };
  const timeoutMs = Math.min(HALT_HOOK_TIMEOUT_MS, sessionMs);
  const problem = await runHook(argv, { cwd: project, env, timeoutMs });
  if (problem === null) return;
  const message = `the on_halt hook failed: ${problem}`;
  logEvent(dir, "WARNING", "WARNING", { message });
  console.error(`warning: ${message}`);
}

/** Runs a hook in a process group of its own, ended at the deadline; says what went wrong, else null. */
async function runHook(
  argv: readonly string[],
  { timeoutMs, ...options }: { cwd: string; env: Record<string, string>; timeoutMs: number },
): Promise<string | null> {
  const streams = { stdin: "null", stdout: "null", stderr: "null" } as const;
  let child: Deno.ChildProcess;
  try {
    child = new Deno.Command(argv[0]!, {
      args: argv.slice(1),
      ...options,
      ...streams,
      detached: true,
    }).spawn();
  } catch (error) {
    return (error as Error).message;
  }
  let timer: ReturnType<typeof setTimeout> | undefined;
  const deadline = new Promise<null>((expire) => {
    timer = setTimeout(() => expire(null), timeoutMs);
  });
  const status = await Promise.race([child.status, deadline]);
  clearTimeout(timer);
  if (status !== null) return status.success ? null : `exit code ${status.code}`;
  killGroup(child.pid);
  return `no end within ${timeoutMs / 1000} s`;
}

/** Turns a pause request into the paused state; only for a running loop, under its lock. */
function honourPauseRequest(dir: string, state: LoopState): void {
  if (state.status !== "running" || !existsSync(pauseRequestPath(dir))) return;
  state.status = "paused";
  saveLoopState(dir, state);
  removeIfPresent(pauseRequestPath(dir));
  logEvent(dir, "INFO", "PAUSED", { iteration_count: state.iteration_count });
}

/** A state as it will be: what is asked to pause counts as paused. */
function countPauseRequest(dir: string, state: LoopState): LoopState {
  const isAsked = state.status === "running" && existsSync(pauseRequestPath(dir));
  return isAsked ? { ...state, status: "paused" } : state;
}

/** When a loop last woke, worked or not: the time of the note in its lock file, else of its last tick. */
function lastWake({ dir, state }: LoopView): number | null {
  const path = join(dir, ".state.lock");
  const woken = readLockNote(path) === null ? 0 : Deno.statSync(path).mtime?.getTime() ?? 0;
  const latest = Math.max(woken, Date.parse(state?.last_tick_at ?? EPOCH));
  return latest > 0 ? latest : null;
}

/**
 * Dollars of cost.json that count; null where none are known.
 *
 * @throws {RefusedError} For a file that cannot be read while a budget depends on it.
 */
function readSpentUsd(dir: string, budgetUsd: number | null): number | null {
  const path = join(dir, "cost.json");
  try {
    const text = readTextIfPresent(path);
    if (text === null) return null;
    const cost = parseJsonText(text, path);
    checkFields(cost, COST_RULES, path);
    return cost.local === true ? null : cost.total_usd as number | undefined ?? null;
  } catch (error) {
    const problem = (error as Error).message;
    if (budgetUsd !== null) {
      throw new RefusedError(
        `${problem}, so the budget cannot be checked`,
        `correct the total in ${path}, or remove it to count from nothing`,
      );
    }
    console.error(`warning: ${problem}; no cost is counted`);
    return null;
  }
}

// deno-fmt-ignore -- a table: one row a line.
const COST_RULES: readonly FieldRule[] = [
  ["total_usd", "a number from 0", isNumberFrom(0)],
  ["local", "true or false", (value) => typeof value === "boolean"],
];

/**
 * The real path of a file that need not exist: its nearest existing ancestor's, and the rest.
 *
 * @throws {RefusedError} For a link that leads nowhere, or a folder that may not be looked into.
 */
function resolveRealPath(path: string): string {
  const rest: string[] = [];
  for (let at = resolve(path);; at = dirname(at)) {
    try {
      return join(Deno.realPathSync(at), ...rest);
    } catch (error) {
      const isMissing = error instanceof Deno.errors.NotFound ||
        error instanceof Deno.errors.NotADirectory;
      if (!isMissing || isLink(at)) {
        const message = `Cannot follow "${at}": ${(error as Error).message}`;
        throw new RefusedError(message, `ls -l "${at}"`);
      }
      rest.unshift(basename(at));
    }
  }
}

function isLink(path: string): boolean {
  try {
    return Deno.lstatSync(path).isSymlink;
  } catch {
    return false; // Nothing of that name at all.
  }
}

async function readGit(cwd: string, args: readonly string[]): Promise<Uint8Array> {
  const { code, stdout, stderr } = await runGit(cwd, args);
  if (code === 0) return stdout;
  throw new RefusedError(
    `Cannot run git ${args[0]} in "${cwd}": ${stderr || `exit code ${code}`}`,
    `run git status in "${cwd}"`,
  );
}

/** The first line that a git command prints; null when it fails. */
async function readGitLine(cwd: string, args: readonly string[]): Promise<string | null> {
  const { code, stdout } = await runGit(cwd, args);
  return code === 0 ? new TextDecoder().decode(stdout).split(/\r?\n/)[0]! : null;
}

/**
 * True when a folder is the top of its own git checkout, not merely inside of another.
 *
 * @throws {RefusedError} Where git cannot tell: a brake must not pass because git did not run.
 */
async function isCheckout(path: string): Promise<boolean> {
  if (!isDirectory(path)) return false;
  const { code, stdout, stderr } = await runGit(path, ["rev-parse", "--show-toplevel"]);
  if (code !== 0) {
    if (/not a git repository/i.test(stderr)) return false;
    throw new RefusedError(`Cannot run git in "${path}": ${stderr}`, `run git status in "${path}"`);
  }
  const top = new TextDecoder().decode(stdout).replace(/\r?\n$/, "");
  return isDirectory(top) && Deno.realPathSync(top) === Deno.realPathSync(path);
}

/** Changed in a checkout and not committed: staged, unstaged and untracked, both names of a rename. */
async function listUncommitted(checkout: string): Promise<string[]> {
  const flags = ["--no-renames", "--untracked-files=all", "--ignore-submodules=none"];
  const output = await readGit(checkout, ["status", "--porcelain", "-z", ...flags]);
  return splitNul(output).map((entry) => entry.slice(3).replace(/\/$/, ""));
}

/** Everything a loop has changed in its worktree, committed or not, since it left the base. */
async function listChangedFiles(
  project: string,
  worktree: string,
  state: LoopState,
): Promise<string[]> {
  const changed = new Set(await listUncommitted(worktree));
  // The loop's branch too: a session may have left its commits there and gone elsewhere.
  for (const tip of ["HEAD", `refs/heads/loop/${state.name}`]) {
    if (await readGitLine(worktree, ["rev-parse", "--verify", "-q", tip]) === null) continue;
    const base = await findBase(project, worktree, { state, tip });
    if (base === null) continue;
    const flags = ["--name-only", "-z", "--no-renames", "--ignore-submodules=none"];
    const output = await readGit(worktree, ["diff", ...flags, base, tip]);
    for (const path of splitNul(output)) changed.add(path);
  }
  // What the index says to be as it was is not looked at by git: it counts as changed while it is there.
  for (const entry of splitNul(await readGit(worktree, ["ls-files", "-v", "-z"]))) {
    const path = entry.slice(2);
    if (/^[a-zS] /.test(entry) && existsSync(join(worktree, path))) changed.add(path);
  }
  return [...changed].sort();
}

/**
 * The commit that a loop's own commits start from: where its branch left the base branch (so that
 * merging the base in later is no drift), else the commit recorded when the worktree was made, else
 * where it left what the project has checked out. Null before the first commit.
 */
async function findBase(
  project: string,
  worktree: string,
  { state, tip }: { state: LoopState; tip: string },
): Promise<string | null> {
  const { base_branch: name, base_commit: commit } = state;
  const branch = typeof name === "string" ? await findFullRef(worktree, name) : null;
  const isRewritten = typeof branch === "string" && typeof commit === "string" &&
    await readGitLine(worktree, ["merge-base", "--is-ancestor", commit, branch]) === null;
  const start = isRewritten
    ? commit
    : branch ?? commit ?? await readGitLine(project, ["rev-parse", "--verify", "HEAD"]);
  if (start === null) return null;
  return await readGitLine(worktree, ["merge-base", start, tip]) ?? commit ?? null;
}

/** The files that a loop changed outside its scope; none where it has no worktree to look at. */
async function listOutOfScope(
  project: string,
  state: LoopState,
  config: LoopConfig,
): Promise<string[]> {
  const scope = config.blast_radius?.file_scope;
  if (scope === undefined) return [];
  if (state.worktree_path === null && config.blast_radius?.worktree === false) return [];
  // A first tick that was killed has saved nothing of the worktree that it made.
  const made = join(loopsDir(project), state.name, "worktree");
  const worktree = resolve(project, state.worktree_path ?? made);
  if (!(await isCheckout(worktree))) return [];
  const files = await listChangedFiles(project, worktree, state);
  return files.filter((path) => !isInScope(path, scope));
}

// --- Schedule ---

/** The schedulers that a loop can be installed with. */
export const SCHEDULERS = ["cron", "systemd", "launchd", "schtasks"] as const;
/** One of SCHEDULERS. */
export type Scheduler = typeof SCHEDULERS[number];

/** Schedulers of other machines: their unit is printed, never installed from here. */
export const PRINTED_SCHEDULERS = ["kubernetes", "github-actions"] as const;
/** One of PRINTED_SCHEDULERS. */
export type PrintedScheduler = typeof PRINTED_SCHEDULERS[number];

const MIN_INTERVAL_S = 60;
/** GitHub starts scheduled workflows at most every five minutes. */
const MIN_WORKFLOW_INTERVAL_S = 300;
/** The longest repetition that the task scheduler of Windows takes (P31D). */
const MAX_INTERVAL_S = 31 * 86_400;
const DAY_MIN = 1440;
const MAX_CRON_LINES = 5;
/** Minutes between two looks at the clock where no calendar expresses an interval: all divide an hour. */
const DUE_PERIODS_MIN = [30, 20, 15, 12, 10, 6, 5, 4, 3, 2, 1];
/** Debian's cron (3.0pl1) refuses a longer command, its comment included. */
const MAX_CRON_COMMAND_BYTES = 980;
const SCHEDULER_TIMEOUT_MS = 15_000;
const POLL_MS = 250;
/** What launchctl answers for a service that is not loaded. */
const LAUNCHD_NOT_LOADED = 113;
/** What it answers while the service of that name is still being unloaded or was disabled just before. */
const LAUNCHD_BUSY = [5, 37, 119];

/** When a loop wakes, in terms that a calendar can express. */
export interface SchedulePlan {
  readonly intervalS: number;
  /** Minutes between two wakes. */
  readonly periodMin: number;
  /** False where a wake is no tick yet: the tick looks at the clock whether it is due. */
  readonly isExact: boolean;
}

/** One time of a plan: a minute in every `hourStep`-th hour from `hour` on. */
export interface CalendarSlot {
  readonly hour: number;
  readonly minute: number;
  readonly hourStep: number;
}

/** What is to be scheduled. */
export interface ScheduleJob {
  readonly loop: string;
  readonly project: string;
  readonly plan: SchedulePlan;
  /** Seconds after which the scheduler ends a tick that hangs; null for never. */
  readonly timeoutS: number | null;
  /** PATH for the tick. */
  readonly path: string;
  /** Variables that the tick gets besides PATH. */
  readonly environment: Readonly<Record<string, string>>;
  /** Words that start loop-runner. */
  readonly runner: readonly string[];
  /** The generated script, and the file that takes its output. */
  readonly script: string;
  readonly log: string;
  /** Name of the timer, label, task or line. */
  readonly unit: string;
}

/** A file that makes up a schedule. */
export interface UnitFile {
  readonly path: string;
  readonly content: string;
}

/** `schedule.json`: what was installed for a loop, so that it can be paused and taken away again. */
export interface ScheduleRecord {
  readonly schema_version: 1;
  readonly scheduler: Scheduler;
  readonly interval_seconds: number;
  /** Whether each wake is a tick. */
  readonly exact: boolean;
  readonly period_seconds: number;
  readonly unit: string;
  /** Files outside the loop's folder. */
  readonly files: readonly string[];
  readonly script: string;
  /** Words that start loop-runner. */
  readonly runner: readonly string[];
  readonly log: string;
  readonly path: string;
  readonly context_tokens: string | null;
  /** The agent's executable as found on that PATH. */
  readonly agent: string | null;
  readonly installed_at: string;
  readonly paused: boolean;
  /** launchd: the session that the agent is loaded in. */
  readonly domain?: string;
  /** The schedule before, in another scheduler or of another name, while it is still to be taken away. */
  readonly replaces?: ScheduleRecord;
  /** cron: the person's last line (a character a byte) where it had no newline before ours came. */
  readonly newline_added_after?: string;
}

/** What appliers need of the machine; tests put their own in its place. */
export interface SchedulerHost {
  readonly run: (argv: readonly string[]) => Promise<CommandOutcome>;
  readonly sleep: (milliseconds: number) => Promise<void>;
  readonly home: string;
  readonly uid: number | null;
  /** Where the person's systemd units lie. */
  readonly unitDir: string;
  /** Where files lie that a scheduler reads once: the loop's folder. */
  readonly scratchDir: string;
}

/** How a schedule is found: `paused` also where it is there and does not run. */
export type SchedulePresence = "active" | "paused" | "gone" | "unknown";

/** Renderer and appliers of one scheduler. */
interface SchedulerDriver {
  readonly nameUnit: (loop: string) => string;
  /** The files outside the loop's folder; for cron its lines. */
  readonly render: (job: ScheduleJob, host: SchedulerHost, domain?: string) => UnitFile[];
  /** True where a unit of that name starts something else. */
  readonly isTaken: (job: ScheduleJob, host: SchedulerHost) => Promise<boolean>;
  /** @returns What the record has to remember besides. */
  readonly install: (
    job: ScheduleJob,
    host: SchedulerHost,
  ) => Promise<Pick<ScheduleRecord, "domain" | "newline_added_after">>;
  /** @param mayEndTick False while a tick of the loop runs, which has to end by itself. */
  readonly pause: (
    record: ScheduleRecord,
    host: SchedulerHost,
    mayEndTick: boolean,
  ) => Promise<void>;
  /** @returns What has changed for the record. */
  readonly resume: (
    record: ScheduleRecord,
    host: SchedulerHost,
  ) => Promise<Pick<ScheduleRecord, "domain">>;
  readonly remove: (record: ScheduleRecord, host: SchedulerHost) => Promise<void>;
  readonly inspect: (record: ScheduleRecord, host: SchedulerHost) => Promise<SchedulePresence>;
}

function greatestCommonDivisor(a: number, b: number): number {
  return b === 0 ? a : greatestCommonDivisor(b, a % b);
}

/**
 * The times of a day at which something wakes every so many minutes.
 *
 * @param periodMin A divisor of 1440.
 */
export function listCalendarSlots(periodMin: number): CalendarSlot[] {
  const cycleMin = periodMin * 60 / greatestCommonDivisor(periodMin, 60);
  return Array.from({ length: cycleMin / periodMin }, (_, index) => ({
    hour: Math.floor(index * periodMin / 60),
    minute: index * periodMin % 60,
    hourStep: cycleMin / 60,
  }));
}

/**
 * Decides how an interval is scheduled. Exact is what a calendar expresses in at most five cron lines; for
 * all else the scheduler wakes the tick more often, which then looks whether it is due.
 *
 * @param intervalS Seconds from 60 to 31 days; Windows rounds up to minutes.
 * @throws {RangeError} For any other interval.
 *
 * @example
 * ```ts
 * import { planSchedule } from "./status.ts";
 * const plan = planSchedule(2700, "cron");
 * if (!plan.isExact || plan.periodMin !== 45) throw new Error("wrong plan");
 * ```
 */
export function planSchedule(
  intervalS: number,
  scheduler: Scheduler | PrintedScheduler,
): SchedulePlan {
  const leastS = scheduler === "github-actions" ? MIN_WORKFLOW_INTERVAL_S : MIN_INTERVAL_S;
  if (!Number.isSafeInteger(intervalS) || intervalS < leastS || intervalS > MAX_INTERVAL_S) {
    throw new RangeError(
      `Cannot schedule an interval of "${intervalS}" s: ${scheduler} takes ${leastS} to ${MAX_INTERVAL_S}`,
    );
  }
  const minutes = intervalS / 60;
  if (scheduler === "schtasks") {
    return { intervalS, periodMin: Math.ceil(minutes), isExact: true };
  }
  const isCalendar = Number.isInteger(minutes) && DAY_MIN % minutes === 0;
  const lines = isCalendar ? renderCronTimes(minutes).length : Infinity;
  const maxLines = scheduler === "kubernetes" ? 1 : MAX_CRON_LINES;
  if (lines <= maxLines) return { intervalS, periodMin: minutes, isExact: true };
  if (lines <= MAX_CRON_LINES) {
    return { intervalS, periodMin: greatestCommonDivisor(minutes, 60), isExact: false };
  }
  const fine = DUE_PERIODS_MIN.find((period) => period * 60 <= intervalS / 20) ?? 1;
  return { intervalS, periodMin: Math.max(fine, leastS / 60), isExact: false };
}

/**
 * The time fields of the cron lines that fire every so many minutes.
 *
 * @param periodMin A divisor of 1440.
 *
 * @example
 * ```ts
 * import { renderCronTimes } from "./status.ts";
 * if (renderCronTimes(5)[0] !== "*\/5 * * * *") throw new Error("wrong line");
 * ```
 */
export function renderCronTimes(periodMin: number): string[] {
  if (periodMin === 1) return ["* * * * *"];
  if (periodMin === 60) return ["0 * * * *"];
  if (60 % periodMin === 0) return [`*/${periodMin} * * * *`];
  if (periodMin === DAY_MIN) return ["0 0 * * *"];
  if (periodMin % 60 === 0) return [`0 */${periodMin / 60} * * *`];
  return listCalendarSlots(periodMin).map(({ hour, minute, hourStep }) =>
    `${minute} ${hourStep === 24 ? hour : `${hour}-23/${hourStep}`} * * *`
  );
}

const twoDigits = (value: number): string => `${value}`.padStart(2, "0");

/**
 * The OnCalendar values of a systemd timer that fires every so many minutes (checked with systemd 252).
 *
 * @param periodMin A divisor of 1440.
 *
 * @example
 * ```ts
 * import { renderCalendar } from "./status.ts";
 * if (renderCalendar(45)[0] !== "00/3:00,45:00") throw new Error("wrong time");
 * ```
 */
export function renderCalendar(periodMin: number): string[] {
  if (periodMin === 1) return ["*:*:00"];
  if (60 % periodMin === 0) return [periodMin === 60 ? "*:00:00" : `*:00/${periodMin}:00`];
  const minutesByHours = new Map<string, string[]>();
  for (const { hour, minute, hourStep } of listCalendarSlots(periodMin)) {
    const hours = hourStep === 24 ? twoDigits(hour) : `${twoDigits(hour)}/${hourStep}`;
    minutesByHours.set(hours, [...minutesByHours.get(hours) ?? [], twoDigits(minute)]);
  }
  return [...minutesByHours].map(([hours, minutes]) => `${hours}:${minutes.join(",")}:00`);
}

/** The StartCalendarInterval entries of launchd, which knows no steps: every time of the day. */
export function listCalendarEntries(periodMin: number): { Hour?: number; Minute: number }[] {
  return listCalendarSlots(periodMin).flatMap(({ hour, minute, hourStep }) => {
    if (hourStep === 1) return [{ Minute: minute }];
    const count = 24 / hourStep;
    return Array.from({ length: count }, (_, index) => ({
      Hour: hour + index * hourStep,
      Minute: minute,
    }));
  });
}

/**
 * The next times at which a loop ticks, in the local calendar.
 *
 * @param fromMs Times after this one.
 * @param lastSlotMs Where the tick checks whether it is due: the slot of the last one, null before the first.
 * @returns Milliseconds since the epoch.
 */
export function listNextFires(
  { intervalS, periodMin, isExact }: SchedulePlan,
  { fromMs, lastSlotMs, count }: { fromMs: number; lastSlotMs: number | null; count: number },
): number[] {
  const periodMs = periodMin * 60_000;
  if (DAY_MIN % periodMin !== 0) {
    // Windows counts from the start of its trigger.
    const anchorMs = new Date(2020, 0, 1).getTime();
    const first = anchorMs + Math.ceil((fromMs + 1 - anchorMs) / periodMs) * periodMs;
    return Array.from({ length: count }, (_, index) => first + index * periodMs);
  }
  const fires: number[] = [];
  let lastMs = lastSlotMs !== null && lastSlotMs <= fromMs ? lastSlotMs : -Infinity;
  for (let at = Math.floor(fromMs / 60_000 + 1) * 60_000; fires.length < count; at += 60_000) {
    const local = new Date(at);
    if ((local.getHours() * 60 + local.getMinutes()) % periodMin !== 0) continue;
    if (!isExact && at < lastMs + intervalS * 1000) continue;
    fires.push(at);
    lastMs = at;
  }
  return fires;
}

/** A time as people read it here: the local date and minute with the zone's offset. */
export function formatLocalTime(atMs: number): string {
  const at = new Date(atMs);
  const offset = -at.getTimezoneOffset();
  const [hours, minutes] = [Math.floor(Math.abs(offset) / 60), Math.abs(offset) % 60];
  const date = [at.getFullYear(), twoDigits(at.getMonth() + 1), twoDigits(at.getDate())].join("-");
  const zone = `${offset < 0 ? "-" : "+"}${twoDigits(hours)}:${twoDigits(minutes)}`;
  return `${date} ${twoDigits(at.getHours())}:${twoDigits(at.getMinutes())} ${zone}`;
}

/** An interval in its largest whole unit. */
export function describeInterval(seconds: number): string {
  const units = [[86_400, "day"], [3600, "h"], [60, "min"]] as const;
  for (const [size, unit] of units) {
    if (seconds % size !== 0) continue;
    const count = seconds / size;
    return `every ${unit === "day" ? countWords(count, unit) : `${count} ${unit}`}`;
  }
  return `every ${seconds} s`;
}

/**
 * Refuses what no unit file can hold: control characters, and what is no text at all.
 *
 * @throws {RefusedError} Names the value.
 */
export function checkUnitValue(kind: string, value: string): string {
  // deno-lint-ignore no-control-regex -- control characters are what is looked for.
  if (!/[\u0000-\u001f\u007f\ufffe\uffff]/.test(value) && value.isWellFormed()) return value;
  throw new RefusedError(
    `Cannot schedule ${kind} ${JSON.stringify(value)}: it holds a control character`,
    "rename it and try again",
  );
}

/**
 * Quotes a word for sh; nothing in it is expanded.
 *
 * @example
 * ```ts
 * import { quoteShWord } from "./status.ts";
 * if (quoteShWord("it's") !== "'it'\\''s'") throw new Error("wrong quoting");
 * ```
 */
export function quoteShWord(word: string): string {
  return `'${word.replaceAll("'", "'\\''")}'`;
}

/**
 * Quotes a word for the command of a cron line. `%` would end the command: it stands behind a backslash
 * outside the quotes, where cron (which takes the backslash away) and busybox (which leaves it to sh)
 * agree. Some crons halve a double backslash, so none is left as one.
 *
 * @example
 * ```ts
 * import { quoteCronWord } from "./status.ts";
 * if (quoteCronWord("/p%c") !== "'/p'\\%'c'") throw new Error("wrong quoting");
 * ```
 */
export function quoteCronWord(word: string): string {
  const quoted = quoteShWord(word.replaceAll("%", "\0")).replaceAll("\0", "'\\%'");
  return quoted.replace(/\\(?=\\)/g, "\\''");
}

/**
 * Quotes an argument of an ExecStart line: systemd unescapes backslashes and expands `%` and `$` (252).
 * Not for the program itself, whose path may hold neither quotes nor backslashes.
 *
 * @example
 * ```ts
 * import { quoteSystemdArgument } from "./status.ts";
 * if (quoteSystemdArgument('/a "b"$%') !== '"/a \\"b\\"$$%%"') throw new Error("wrong quoting");
 * ```
 */
export function quoteSystemdArgument(word: string): string {
  return `"${word.replace(/["\\]/g, "\\$&").replace(/[$%]/g, "$&$&")}"`;
}

/**
 * Escapes a text for XML, in elements as in attributes.
 *
 * @example
 * ```ts
 * import { escapeXml } from "./status.ts";
 * if (escapeXml("a<b&c") !== "a&#60;b&#38;c") throw new Error("wrong escape");
 * ```
 */
export function escapeXml(text: string): string {
  // The last two are ends of lines to parsers that go by XML 1.1.
  return text.replace(
    /[&<>"'\u0085\u2028]/g,
    (character) => `&#${character.charCodeAt(0)};`,
  );
}

/**
 * Quotes a text for YAML: a JSON string, with what YAML does not print escaped too.
 *
 * @example
 * ```ts
 * import { quoteYaml } from "./status.ts";
 * if (quoteYaml("no: # 'x'") !== `"no: # 'x'"`) throw new Error("wrong quoting");
 * ```
 */
export function quoteYaml(text: string): string {
  return JSON.stringify(text).replace(
    /[\u007f-\u009f\u2028\u2029\ufeff\ufffe\uffff]/g,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/**
 * Quotes an argument as programs on Windows split their command line (CommandLineToArgvW).
 *
 * @example
 * ```ts
 * import { quoteWindowsArgument } from "./status.ts";
 * if (quoteWindowsArgument("C:\\my dir\\") !== '"C:\\my dir\\\\"') throw new Error("wrong quoting");
 * ```
 */
export function quoteWindowsArgument(word: string): string {
  if (/^[\w:\\./=-]+$/.test(word)) return word;
  return `"${word.replace(/(\\*)"/g, '$1$1\\"').replace(/\\+$/, "$&$&")}"`;
}

/**
 * The script that the scheduler starts: the PATH of the person who installed it, the project, one tick.
 *
 * @returns POSIX sh with every value quoted.
 */
export function renderTickScript(job: ScheduleJob): string {
  const lines = Object.entries(job.environment).map(([name, value]) =>
    `export ${name}=${quoteShWord(value)}`
  );
  const tick = `--mode tick --loop ${job.loop} --project ${quoteShWord(job.project)}`;
  // Without a PATH of our own an empty first folder would mean the working directory.
  const path = job.path === ""
    ? ""
    : `PATH=${quoteShWord(job.path)}"\${PATH:+:$PATH}"\nexport PATH\n`;
  return `#!/bin/sh
# One tick of loop ${job.loop}. Written by status --install-schedule, which writes it anew each time.
${path}${lines.map((line) => `${line}\n`).join("")}cd ${quoteShWord(job.project)} || exit 1
exec ${job.runner.map(quoteShWord).join(" ")} ${tick}
`;
}

/** What the tick's own check needs to know, where the calendar alone does not decide. */
function dueEnvironment({ intervalS, periodMin, isExact }: SchedulePlan): Record<string, string> {
  if (isExact) return {};
  return {
    AUTOMATON_DUE_INTERVAL_S: `${intervalS}`,
    AUTOMATON_DUE_PERIOD_S: `${periodMin * 60}`,
  };
}

const cronMarker = (loop: string): string => ` # automaton-loop:${loop}`;

/**
 * The lines of a crontab that tick a loop.
 *
 * @throws {RefusedError} Where cron would refuse a line for its length.
 */
export function renderCronLines({ plan, script, log, unit }: ScheduleJob): string[] {
  const command = `${quoteCronWord(script)} >>${quoteCronWord(log)} 2>&1${cronMarker(unit)}`;
  const bytes = new TextEncoder().encode(command).length;
  if (bytes > MAX_CRON_COMMAND_BYTES) {
    throw new RefusedError(
      `Cannot schedule "${script}": its cron line would hold ${bytes} bytes, over ${MAX_CRON_COMMAND_BYTES}`,
      "move the project to a folder with a shorter path",
    );
  }
  return renderCronTimes(plan.periodMin).map((time) => `${time} ${command}`);
}

const renderExecStart = (script: string): string =>
  `ExecStart=/bin/sh ${quoteSystemdArgument(script)}`;

/** A systemd timer and the service that it starts (systemd 252: `systemd-analyze --user verify`). */
export function renderSystemdUnits(
  { loop, plan, script, timeoutS, unit }: ScheduleJob,
): { timer: string; service: string } {
  const calendar = renderCalendar(plan.periodMin).map((time) => `OnCalendar=${time}\n`).join("");
  const timer = `# Written by status --install-schedule, which writes it anew each time.
[Unit]
Description=Wakes Automaton loop ${loop}

[Timer]
${calendar}Persistent=true
AccuracySec=1s
Unit=${unit}.service

[Install]
WantedBy=timers.target
`;
  const service = `# Written by status --install-schedule, which writes it anew each time.
[Unit]
Description=One tick of Automaton loop ${loop}

[Service]
Type=oneshot
${renderExecStart(script)}
TimeoutStartSec=${timeoutS ?? "infinity"}
KillMode=control-group
Nice=10
`;
  return { timer, service };
}

/**
 * A launchd agent. StartInterval would lose firings while the machine sleeps, the calendar does not.
 *
 * @param domain `gui/UID`, or `user/UID` where nobody has a graphical session.
 */
export function renderLaunchAgent(job: ScheduleJob, domain: string): string {
  const text = (value: string) => `<string>${escapeXml(value)}</string>`;
  const entries = listCalendarEntries(job.plan.periodMin).map((entry) => {
    const keys = Object.entries(entry).map(([key, value]) =>
      `<key>${key}</key><integer>${value}</integer>`
    );
    return `    <dict>${keys.join("")}</dict>\n`;
  });
  const agent = `<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0">
<dict>
  <key>Label</key>
  ${text(job.unit)}
  <key>ProgramArguments</key>
  <array>
    ${text(job.script)}
  </array>
  <key>EnvironmentVariables</key>
  <dict>
    <key>PATH</key>
    ${text(job.path)}
  </dict>
  <key>WorkingDirectory</key>
  ${text(job.project)}
  <key>StandardOutPath</key>
  ${text(job.log)}
  <key>StandardErrorPath</key>
  ${text(job.log)}
  <key>ProcessType</key>
  ${text("Background")}
  <key>StartCalendarInterval</key>
  <array>
${entries.join("")}  </array>
</dict>
</plist>
`;
  return moveLaunchAgent(agent, domain);
}

const BACKGROUND_SESSION = "  <key>LimitLoadToSessionType</key>\n  <string>Background</string>\n";

/** The text of an agent for another session: only that of the background has to be named. */
function moveLaunchAgent(agent: string, domain: string): string {
  const bare = agent.replace(BACKGROUND_SESSION, "");
  if (domain.startsWith("gui/")) return bare;
  return bare.replace("  <key>StartCalendarInterval</key>\n", `${BACKGROUND_SESSION}$&`);
}

/**
 * A task for `schtasks /create /xml`. Repetition without Duration goes on for ever; the defaults for
 * batteries, missed starts and 72 hours are not what a loop wants, so all are set.
 */
export function renderTaskXml(job: ScheduleJob): string {
  const [command, ...words] = [
    ...job.runner,
    ...["--mode", "tick", "--loop", job.loop, "--project", job.project],
  ];
  const limit = job.timeoutS === null ? "PT0S" : `PT${job.timeoutS}S`;
  return `<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>One tick of Automaton loop ${escapeXml(job.loop)}</Description>
  </RegistrationInfo>
  <Triggers>
    <TimeTrigger>
      <Repetition>
        <Interval>PT${job.plan.periodMin}M</Interval>
        <StopAtDurationEnd>false</StopAtDurationEnd>
      </Repetition>
      <StartBoundary>2020-01-01T00:00:00</StartBoundary>
      <Enabled>true</Enabled>
    </TimeTrigger>
  </Triggers>
  <Principals>
    <Principal id="Author">
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <AllowHardTerminate>true</AllowHardTerminate>
    <StartWhenAvailable>true</StartWhenAvailable>
    <RunOnlyIfNetworkAvailable>false</RunOnlyIfNetworkAvailable>
    <AllowStartOnDemand>true</AllowStartOnDemand>
    <Enabled>true</Enabled>
    <Hidden>false</Hidden>
    <RunOnlyIfIdle>false</RunOnlyIfIdle>
    <WakeToRun>false</WakeToRun>
    <ExecutionTimeLimit>${limit}</ExecutionTimeLimit>
    <Priority>7</Priority>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>${escapeXml(command!)}</Command>
      <Arguments>${escapeXml(words.map(quoteWindowsArgument).join(" "))}</Arguments>
      <WorkingDirectory>${escapeXml(job.project)}</WorkingDirectory>
    </Exec>
  </Actions>
</Task>
`.replaceAll("\n", "\r\n");
}

/** Encodes a text as UTF-16LE with a byte order mark, without which schtasks reads no XML. */
export function encodeUtf16(text: string): Uint8Array {
  const bytes = new Uint8Array(2 + 2 * text.length);
  const view = new DataView(bytes.buffer);
  view.setUint16(0, 0xfeff, true);
  for (let index = 0; index < text.length; index++) {
    view.setUint16(2 + 2 * index, text.charCodeAt(index), true);
  }
  return bytes;
}

/** The tick's variables on another machine, which has folders of its own. */
function listForeignVariables({ environment }: ScheduleJob): [string, string][] {
  return Object.entries(environment).filter(([name]) => name !== "AUTOMATON_HOME");
}

/** Kubernetes takes 52 characters for a CronJob, the last of them no dash: else a hash (FNV-1a) ends it. */
function nameCronJob(loop: string): string {
  const name = `automaton-loop-${loop}`;
  if (name.length <= 52 && !name.endsWith("-")) return name;
  let hash = 0x811c9dc5;
  for (const byte of textToBytes(name)) hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
  return `${name.slice(0, 43).replace(/-+$/, "")}-${hash.toString(16).padStart(8, "0")}`;
}

/**
 * A Kubernetes CronJob that ticks a loop (batch/v1). State, worktree and commits live in the volume, which
 * holds the project with its `.automaton`; the image holds Automaton, git and the agent.
 */
export function renderCronJob(job: ScheduleJob): string {
  const { loop, plan, timeoutS } = job;
  const name = nameCronJob(loop);
  const variables = listForeignVariables(job).map(([key, value]) =>
    `                - name: ${key}\n                  value: ${quoteYaml(value)}\n`
  );
  return `# One tick of Automaton loop ${loop}, ${describeInterval(plan.intervalS)}.
# State lives in the volume: the claim ${name} holds the project, its .automaton and all worktrees.
# The image is yours to name: it holds Automaton's programs, git and the agent. Times are the cluster's, mostly UTC.
apiVersion: batch/v1
kind: CronJob
metadata:
  name: ${quoteYaml(name)}
spec:
  schedule: ${quoteYaml(renderCronTimes(plan.periodMin)[0]!)}
  concurrencyPolicy: Forbid
  successfulJobsHistoryLimit: 1
  failedJobsHistoryLimit: 3
  jobTemplate:
    spec:
      backoffLimit: 0
      activeDeadlineSeconds: ${timeoutS ?? 7 * 86_400}
      template:
        spec:
          restartPolicy: Never
          automountServiceAccountToken: false
          securityContext:
            runAsNonRoot: true
            runAsUser: 1000
            runAsGroup: 1000
            fsGroup: 1000
            seccompProfile:
              type: RuntimeDefault
          containers:
            - name: tick
              image: "automaton:latest"
              command: ["loop-runner"]
              args: ["--mode", "tick", "--loop", ${quoteYaml(loop)}, "--project", "/project"]
              workingDir: "/project"
              env:
                - name: HOME
                  value: "/tmp"
${variables.join("")}              securityContext:
                allowPrivilegeEscalation: false
                capabilities:
                  drop: ["ALL"]
              volumeMounts:
                - name: project
                  mountPath: "/project"
          volumes:
            - name: project
              persistentVolumeClaim:
                claimName: ${quoteYaml(name)}
`;
}

/**
 * A GitHub workflow that ticks a loop. State lives in the branch `automaton-state-<loop>`, which holds
 * `.automaton`; the loop's commits are in `loop/<loop>`. Both are pushed after each tick.
 */
export function renderWorkflow(job: ScheduleJob): string {
  const { loop, plan, timeoutS } = job;
  const times = renderCronTimes(plan.periodMin).map((time) => `    - cron: ${quoteYaml(time)}\n`);
  const variables = listForeignVariables(job).map(([name, value]) =>
    `          ${name}: ${quoteYaml(value)}\n`
  );
  const minutes = Math.min(360, Math.ceil((timeoutS ?? Infinity) / 60));
  const branch = `automaton-state-${loop}`;
  return `# .github/workflows/automaton-loop-${loop}.yml: one tick ${
    describeInterval(plan.intervalS)
  }.
# State lives in the branch ${branch}, which holds what is in .automaton here: push it once before the
# first run. Commits of the loop are in loop/${loop}. Times are UTC, and GitHub may start late.
# The repository variable AUTOMATON_REPOSITORY is the address that Automaton is cloned from.
name: ${quoteYaml(`Automaton loop ${loop}`)}
on:
  schedule:
${times.join("")}  workflow_dispatch:
permissions:
  contents: write
concurrency:
  group: ${quoteYaml(`automaton-loop-${loop}`)}
  cancel-in-progress: false
jobs:
  tick:
    runs-on: ubuntu-latest
    timeout-minutes: ${minutes}
    steps:
      - uses: actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2
        with:
          fetch-depth: 0
      - uses: actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2
        with:
          ref: ${branch}
          path: .automaton
      - name: Bring back the loop's branch
        run: |
          git config --global user.name automaton
          git config --global user.email automaton@users.noreply.github.com
          echo .automaton/ >>.git/info/exclude
          git branch loop/${loop} origin/loop/${loop} || true
      - name: Install Automaton
        env:
          AUTOMATON_REPOSITORY: \${{ vars.AUTOMATON_REPOSITORY }}
        run: |
          git clone --quiet --depth 1 "$AUTOMATON_REPOSITORY" "$RUNNER_TEMP/automaton"
          "$RUNNER_TEMP/automaton/install.sh" --no-loop --no-schedule
      # Install the agent of the loop here and give the next step its key as a secret.
      - name: Tick
${variables.length === 0 ? "" : `        env:\n${variables.join("")}`}\
        run: |
          "$RUNNER_TEMP/automaton/bin/loop-runner" --mode tick --loop ${loop} --project "$PWD"
      - name: Keep state and branch
        if: always()
        run: |
          git -C .automaton add --all -- ':!loops/*/worktree'
          git -C .automaton commit --quiet -m "Tick of loop ${loop}" || true
          git -C .automaton push --quiet origin HEAD:${branch}
          git push --quiet origin loop/${loop} || true
`;
}

/** Each byte as one character: text operations on a file whose encoding nobody knows lose nothing. */
export function bytesToText(bytes: Uint8Array): string {
  let text = "";
  for (let start = 0; start < bytes.length; start += 8192) {
    text += String.fromCharCode(...bytes.subarray(start, start + 8192));
  }
  return text;
}

/** The bytes of a text made by `bytesToText`. */
export function textToBytes(text: string): Uint8Array {
  return Uint8Array.from(text, (character) => character.charCodeAt(0));
}

const encodeLine = (line: string): string => bytesToText(new TextEncoder().encode(line));

/** By what a loop knows its own lines in a crontab. */
export interface CronOwner {
  readonly unit: string;
  readonly script: string;
}

/** True for a line, commented or not, that was written for this loop of this project. */
export function isOwnCronLine(line: string, { unit, script }: CronOwner): boolean {
  return line.endsWith(encodeLine(cronMarker(unit))) &&
    line.includes(encodeLine(` ${quoteCronWord(script)} >>`));
}

/**
 * Puts a loop's lines into a crontab: in the place of its old ones, else at the end. Every other byte
 * stays, but for a newline after a last line that has none.
 *
 * @param table The crontab, a character a byte.
 * @returns The new table, and the last line where it got its newline here.
 */
export function installCronLines(
  table: string,
  owner: CronOwner,
  lines: readonly string[],
): { table: string; newlineAddedAfter: string | null } {
  const rows = table.split("\n");
  const last = rows.pop()!;
  if (last !== "") rows.push(last);
  const at = rows.findIndex((row) => isOwnCronLine(row, owner));
  const others = rows.filter((row) => !isOwnCronLine(row, owner));
  others.splice(at < 0 ? others.length : at, 0, ...lines.map(encodeLine));
  const isLastOurs = last === "" || isOwnCronLine(last, owner);
  return {
    table: others.map((row) => `${row}\n`).join(""),
    newlineAddedAfter: isLastOurs ? null : last,
  };
}

/**
 * Takes a loop's lines out of a crontab, and the newline that came with them.
 *
 * @param newlineAddedAfter The line that had none; nothing is taken when it is not the last any more.
 */
export function removeCronLines(
  table: string,
  owner: CronOwner,
  newlineAddedAfter: string | undefined,
): string {
  const rows = table.split("\n").filter((row) => !isOwnCronLine(row, owner));
  if (newlineAddedAfter !== undefined && rows.at(-1) === "" && rows.at(-2) === newlineAddedAfter) {
    rows.pop();
  }
  return rows.join("\n");
}

/** Comments a loop's lines out, or takes those `#` away again. */
export function switchCronLines(table: string, owner: CronOwner, to: "on" | "off"): string {
  return table.split("\n").map((row) => {
    if (!isOwnCronLine(row, owner) || row.startsWith("#") === (to === "off")) return row;
    return to === "off" ? `#${row}` : row.slice(1);
  }).join("\n");
}

/** Why a scheduler's command did not do what it was asked, in its own words. */
function explainOutcome(argv: readonly string[], { code, stderr }: CommandOutcome): string {
  if (code === null && /not found|no such file/i.test(stderr)) return `${argv[0]} is not installed`;
  const words = stderr.split("\n").find((line) => line.trim() !== "")?.trim();
  if (code === null) return words ?? `${argv[0]} did not run`;
  return `${argv.slice(0, 2).join(" ")} ended with exit code ${code}${words ? `: ${words}` : ""}`;
}

async function runScheduler(host: SchedulerHost, argv: readonly string[]): Promise<void> {
  const outcome = await host.run(argv);
  if (outcome.code !== 0) throw makeSchedulerError(argv, outcome);
}

function makeSchedulerError(argv: readonly string[], outcome: CommandOutcome): RefusedError {
  return new RefusedError(
    `Cannot change the schedule: ${explainOutcome(argv, outcome)}`,
    "status --doctor tells what the scheduler lacks",
  );
}

/** Reads the person's crontab. Only cron's own word that there is none counts as an empty one. */
async function readCrontab(host: SchedulerHost): Promise<string> {
  const argv = ["crontab", "-l"];
  const outcome = await host.run(argv);
  if (outcome.code === 0) return bytesToText(outcome.stdout);
  const isAbsent = outcome.code !== null &&
    /no crontab for |can't open .*No such file/.test(outcome.stderr);
  if (isAbsent) return "";
  throw new RefusedError(
    `Cannot read the crontab: ${explainOutcome(argv, outcome)}`,
    "crontab -l must work for you; else use --scheduler systemd or loop-runner --mode daemon",
  );
}

async function readCrontabOrNull(host: SchedulerHost): Promise<string | null> {
  try {
    return await readCrontab(host);
  } catch {
    return null; // Not what was written, then; what is to be told is how the writing ended.
  }
}

/** Holds other loops of the same person off while what they share is read, changed and written. */
async function withHomeLock<T>(host: SchedulerHost, work: () => Promise<T>): Promise<T> {
  using _folder = await lockHome(host);
  return await work();
}

/** @returns The locked folder, or null for one that cannot be locked: what is written is read back anyway. */
async function lockHome(host: SchedulerHost): Promise<Deno.FsFile | null> {
  let folder: Deno.FsFile | null = null;
  try {
    folder = Deno.openSync(host.home, { read: true });
    const deadline = performance.now() + SCHEDULER_TIMEOUT_MS;
    let isLocked = await tryLock(folder, SCHEDULER_TIMEOUT_MS);
    while (isLocked === false && performance.now() < deadline) {
      await host.sleep(50);
      isLocked = await tryLock(folder, SCHEDULER_TIMEOUT_MS);
    }
    if (isLocked) return folder;
    if (isLocked === false) folder.close(); // Else the lock that comes late closes it.
  } catch {
    folder?.close();
    return null; // On a network, or missing.
  }
  throw new RefusedError(
    `Cannot lock "${host.home}": another command has held it for ${SCHEDULER_TIMEOUT_MS / 1000} s`,
    "try again; it lasts only where a process hangs",
  );
}

function writePrivate(path: string, text: string): void {
  removeIfPresent(path);
  Deno.writeFileSync(path, textToBytes(text), { createNew: true, mode: 0o600 });
}

/** Changes the person's crontab and reads it back; what is not there as it was written is undone. */
async function changeCrontab(
  host: SchedulerHost,
  change: (table: string) => string,
): Promise<void> {
  await withHomeLock(host, async () => {
    const before = await readCrontab(host);
    const after = change(before);
    if (after === before) return;
    const [backup, file] = [".crontab.backup", ".crontab.new"].map((name) =>
      join(host.scratchDir, name)
    ) as [string, string];
    writePrivate(backup, before);
    writePrivate(file, after);
    try {
      await replaceCrontab(host, { before, after, backup, file });
    } finally {
      removeIfPresent(file);
    }
    removeIfPresent(backup);
  });
}

/** A crontab is neither what it was nor what it was to be. */
class CrontabLostError extends RefusedError {}

async function replaceCrontab(
  host: SchedulerHost,
  { before, after, backup, file }: { before: string; after: string; backup: string; file: string },
): Promise<void> {
  const argv = ["crontab", file];
  const outcome = await host.run(argv);
  const found = await readCrontabOrNull(host);
  if (found === after) return;
  const refusal = outcome.code === 0
    ? "it reads back differently from what was written"
    : explainOutcome(argv, outcome);
  if (found !== before) await host.run(["crontab", backup]);
  if (found === before || await readCrontabOrNull(host) === before) {
    removeIfPresent(backup);
    throw new RefusedError(
      `Cannot change the crontab: ${refusal}; it is as it was`,
      "try --scheduler systemd, or loop-runner --mode daemon",
    );
  }
  throw new CrontabLostError(
    `Cannot change the crontab: ${refusal}, and it could not be put back`,
    `look at it with crontab -l; it was as in ${backup}`,
  );
}

const CRON_DRIVER: SchedulerDriver = {
  nameUnit: (loop) => loop,
  render: (job) => [{
    path: "crontab",
    content: renderCronLines(job).map((line) => `${line}\n`).join(""),
  }],
  isTaken: () => Promise.resolve(false), // Lines are told apart by their script.
  install: async (job, host) => {
    const lines = renderCronLines(job);
    let added: string | null = null;
    await changeCrontab(host, (table) => {
      const installed = installCronLines(table, job, lines);
      added = installed.newlineAddedAfter;
      return installed.table;
    });
    return added === null ? {} : { newline_added_after: added };
  },
  pause: (record, host) => changeCrontab(host, (table) => switchCronLines(table, record, "off")),
  resume: async (record, host) => {
    await changeCrontab(host, (table) => switchCronLines(table, record, "on"));
    return {};
  },
  remove: (record, host) =>
    changeCrontab(host, (table) => removeCronLines(table, record, record.newline_added_after)),
  inspect: async (record, host) => {
    const table = await readCrontabOrNull(host);
    if (table === null) return "unknown";
    const own = table.split("\n").filter((row) => isOwnCronLine(row, record));
    if (own.length === 0) return "gone";
    return own.some((row) => !row.startsWith("#")) ? "active" : "paused";
  },
};

const systemctl = (...words: string[]): string[] => ["systemctl", "--user", ...words];

/** True where a file is there and does not hold a text. */
function holdsOther(path: string, text: string): boolean {
  const found = readTextIfPresent(path);
  return found !== null && !found.includes(text);
}

function writeUnits(files: readonly UnitFile[]): void {
  for (const { path, content } of files) {
    ensureDirSync(dirname(path));
    writeFileAtomic(path, content);
  }
}

/** True where a unit of a record's name starts another project's loop. */
function isOthersService({ script, files }: ScheduleRecord): boolean {
  const service = files.find((path) => path.endsWith(".service"));
  return service !== undefined && holdsOther(service, `${renderExecStart(script)}\n`);
}

/** True where the link is there that systemd makes for a timer that is enabled. */
function isTimerEnabled({ unit, files }: ScheduleRecord): boolean {
  return files.some((path) =>
    isAnythingAt(join(dirname(path), "timers.target.wants", `${unit}.timer`))
  );
}

const SYSTEMD_DRIVER: SchedulerDriver = {
  nameUnit: (loop) => `automaton-loop-${loop}`,
  render: (job, host) => {
    const { timer, service } = renderSystemdUnits(job);
    return [
      { path: join(host.unitDir, `${job.unit}.timer`), content: timer },
      { path: join(host.unitDir, `${job.unit}.service`), content: service },
    ];
  },
  isTaken: (job, host) => {
    const service = join(host.unitDir, `${job.unit}.service`);
    return Promise.resolve(holdsOther(service, `${renderExecStart(job.script)}\n`));
  },
  install: async (job, host) => {
    writeUnits(SYSTEMD_DRIVER.render(job, host));
    await runScheduler(host, systemctl("daemon-reload"));
    await runScheduler(host, systemctl("enable", `${job.unit}.timer`));
    // A changed timer takes its new times only when it is started anew.
    await runScheduler(host, systemctl("restart", `${job.unit}.timer`));
    await runScheduler(host, systemctl("is-active", "--quiet", `${job.unit}.timer`));
    return {};
  },
  pause: ({ unit }, host) => runScheduler(host, systemctl("disable", "--now", `${unit}.timer`)),
  resume: async ({ unit }, host) => {
    await runScheduler(host, systemctl("enable", "--now", `${unit}.timer`));
    return {};
  },
  remove: async (record, host) => {
    const { unit, files } = record;
    if (isOthersService(record)) return;
    if (files.some((path) => existsSync(path))) {
      const argv = systemctl("disable", "--now", `${unit}.timer`);
      const outcome = await host.run(argv);
      // A timer that never was enabled goes without systemd's word.
      if (outcome.code !== 0 && isTimerEnabled(record)) throw makeSchedulerError(argv, outcome);
    }
    files.forEach(removeIfPresent);
    await runScheduler(host, systemctl("daemon-reload"));
    // Fails where the last tick did not: there is nothing to forget then.
    await host.run(systemctl("reset-failed", `${unit}.service`));
  },
  inspect: async (record, host) => {
    const { unit, files } = record;
    const isThere = files.every((path) => existsSync(path)) || isTimerEnabled(record);
    if (!isThere || isOthersService(record)) return "gone";
    const { code } = await host.run(systemctl("is-active", "--quiet", `${unit}.timer`));
    // 3: there and not running; 4: no such unit; anything else: no answer (systemctl, 252).
    return code === 0 ? "active" : code === 3 ? "paused" : code === 4 ? "gone" : "unknown";
  },
};

/** The session that agents of this person belong to: the graphical one, else the background's. */
async function findLaunchdDomain(host: SchedulerHost): Promise<string> {
  const gui = `gui/${host.uid}`;
  const argv = ["launchctl", "print", gui];
  const outcome = await host.run(argv);
  if (outcome.code === null) throw makeSchedulerError(argv, outcome);
  return outcome.code === 0 ? gui : `user/${host.uid}`;
}

/** Asks again until an answer is right, for as long as any command of a scheduler may take. */
async function pollScheduler(
  host: SchedulerHost,
  argv: readonly string[],
  isRight: (code: number | null) => boolean,
): Promise<CommandOutcome> {
  for (let left = SCHEDULER_TIMEOUT_MS / POLL_MS;; left--) {
    const outcome = await host.run(argv);
    if (isRight(outcome.code) || outcome.code === null || left <= 1) return outcome;
    await host.sleep(POLL_MS);
  }
}

/** Loads an agent. Unloading the one before is asynchronous and refuses a new one for some seconds. */
async function loadLaunchAgent(
  host: SchedulerHost,
  { domain, label, plist }: { domain: string; label: string; plist: string },
): Promise<void> {
  const service = `${domain}/${label}`;
  await host.run(["launchctl", "bootout", service]); // Fails where none is loaded, which is the aim.
  const print = ["launchctl", "print", service];
  await pollScheduler(host, print, (code) => code === LAUNCHD_NOT_LOADED);
  // A label that was once disabled stays so, whatever the plist says.
  await host.run(["launchctl", "enable", service]);
  const bootstrap = ["launchctl", "bootstrap", domain, plist];
  const outcome = await pollScheduler(
    host,
    bootstrap,
    (code) => !LAUNCHD_BUSY.includes(code ?? 0),
  );
  const { code } = await host.run(print);
  if (code === 0) return;
  throw new RefusedError(
    `Cannot load "${plist}": ${explainOutcome(bootstrap, outcome)}`,
    `launchctl print-disabled ${domain}`,
  );
}

const disabledPath = (plist: string): string => `${plist}.disabled`;

/** True where an agent of a record's name, also a paused one, starts another project's loop. */
function isOthersAgent({ script, files }: ScheduleRecord): boolean {
  const own = `<string>${escapeXml(script)}</string>`;
  const there = files.flatMap((plist) => [plist, disabledPath(plist)]).filter((path) =>
    existsSync(path)
  );
  return there.length > 0 && there.every((path) => holdsOther(path, own));
}

const LAUNCHD_DRIVER: SchedulerDriver = {
  nameUnit: (loop) => `com.automaton.loop.${loop}`,
  render: (job, host, domain = `gui/${host.uid}`) => [{
    path: join(host.home, "Library", "LaunchAgents", `${job.unit}.plist`),
    content: renderLaunchAgent(job, domain),
  }],
  isTaken: (job, host) => {
    const [file] = LAUNCHD_DRIVER.render(job, host);
    const own = `<string>${escapeXml(job.script)}</string>`;
    return Promise.resolve(
      holdsOther(file!.path, own) || holdsOther(disabledPath(file!.path), own),
    );
  },
  install: async (job, host) => {
    const domain = await findLaunchdDomain(host);
    const [file] = LAUNCHD_DRIVER.render(job, host, domain);
    writeUnits([file!]);
    removeIfPresent(disabledPath(file!.path));
    await loadLaunchAgent(host, { domain, label: job.unit, plist: file!.path });
    return { domain };
  },
  pause: async ({ unit, files, domain }, host, mayEndTick) => {
    // bootout ends a running tick: then the disabled agent stays loaded, and its ticks are skipped.
    if (mayEndTick) await host.run(["launchctl", "bootout", `${domain}/${unit}`]);
    const outcome = await host.run(["launchctl", "disable", `${domain}/${unit}`]);
    for (const plist of files) {
      if (existsSync(plist)) Deno.renameSync(plist, disabledPath(plist));
    }
    if (outcome.code === 0) return;
    throw new RefusedError(
      `Cannot disable "${unit}": ${explainOutcome(["launchctl", "disable"], outcome)}`,
      `launchctl print ${domain}/${unit}`,
    );
  },
  resume: async ({ unit, files, domain: before }, host) => {
    const plist = files[0]!;
    if (existsSync(disabledPath(plist))) Deno.renameSync(disabledPath(plist), plist);
    const domain = await findLaunchdDomain(host);
    const text = readTextIfPresent(plist);
    if (domain !== before && text !== null) {
      writeFileAtomic(plist, moveLaunchAgent(text, domain));
      // In the session before nothing of it is to stay, its pause neither. Both fail where it has ended.
      await host.run(["launchctl", "bootout", `${before}/${unit}`]);
      await host.run(["launchctl", "enable", `${before}/${unit}`]);
    }
    await loadLaunchAgent(host, { domain, label: unit, plist });
    return { domain };
  },
  remove: async (record, host) => {
    const { unit, files, domain } = record;
    if (isOthersAgent(record)) return;
    const print = ["launchctl", "print", `${domain}/${unit}`];
    await host.run(["launchctl", "bootout", `${domain}/${unit}`]); // Fails where none is loaded.
    const outcome = await pollScheduler(host, print, (code) => code === LAUNCHD_NOT_LOADED);
    if (outcome.code === 0 || outcome.code === null) {
      const why = outcome.code === 0 ? "it is still loaded" : explainOutcome(print, outcome);
      throw new RefusedError(
        `Cannot unload "${unit}": ${why}`,
        `launchctl bootout ${domain}/${unit}`,
      );
    }
    for (const plist of files) [plist, disabledPath(plist)].forEach(removeIfPresent);
    // Forgets a pause, or the label would stay disabled for whoever uses it next.
    await host.run(["launchctl", "enable", `${domain}/${unit}`]);
  },
  inspect: async (record, host) => {
    const { unit, files, domain } = record;
    const [plist] = files;
    if (isOthersAgent(record)) return "gone";
    if (!existsSync(plist!)) return existsSync(disabledPath(plist!)) ? "paused" : "gone";
    const { code } = await host.run(["launchctl", "print", `${domain}/${unit}`]);
    return code === 0 ? "active" : code === LAUNCHD_NOT_LOADED ? "paused" : "unknown";
  },
};

const schtasks = (verb: string, unit: string, ...words: string[]): string[] => [
  "schtasks",
  `/${verb}`,
  "/tn",
  unit,
  ...words,
];

/** The words of a task's XML, in whichever encoding the console has. */
function readTaskText(stdout: Uint8Array): string {
  const isWide = stdout[0] === 0xff || stdout[1] === 0;
  return new TextDecoder(isWide ? "utf-16le" : "utf-8").decode(stdout);
}

/** True where a task works in another project; only plain paths come back just as they were written. */
function isOthersTask(xml: string, { log }: ScheduleRecord): boolean {
  const project = resolve(dirname(log), "..", "..", "..");
  if (!/^[\w\\/:. -]+$/.test(project)) return false;
  return !xml.includes(`<WorkingDirectory>${project}</WorkingDirectory>`);
}

const SCHTASKS_DRIVER: SchedulerDriver = {
  nameUnit: (loop) => `AutomatonLoop_${loop}`,
  render: (job) => [{ path: `${job.unit}.xml`, content: renderTaskXml(job) }],
  isTaken: async (job, host) => {
    const { code, stdout } = await host.run(schtasks("query", job.unit, "/xml"));
    const own = `<WorkingDirectory>${escapeXml(job.project)}</WorkingDirectory>`;
    return code === 0 && !readTaskText(stdout).includes(own);
  },
  install: async (job, host) => {
    const file = join(host.scratchDir, ".task.xml");
    Deno.writeFileSync(file, encodeUtf16(renderTaskXml(job)));
    try {
      await runScheduler(host, schtasks("create", job.unit, "/xml", file, "/f"));
    } finally {
      removeIfPresent(file);
    }
    await runScheduler(host, schtasks("query", job.unit));
    return {};
  },
  pause: ({ unit }, host) => runScheduler(host, schtasks("change", unit, "/disable")),
  resume: async ({ unit }, host) => {
    await runScheduler(host, schtasks("change", unit, "/enable"));
    return {};
  },
  remove: async (record, host) => {
    const { code, stdout } = await host.run(schtasks("query", record.unit, "/xml"));
    if (code === 0 && isOthersTask(readTaskText(stdout), record)) return;
    const argv = schtasks("delete", record.unit, "/f");
    const outcome = await host.run(argv);
    // Its exit code does not tell a task that is not there from one that stays.
    if (outcome.code === 0 || await SCHTASKS_DRIVER.inspect(record, host) === "gone") return;
    throw makeSchedulerError(argv, outcome);
  },
  inspect: async (record, host) => {
    const { code, stdout } = await host.run(schtasks("query", record.unit, "/xml"));
    if (code === null) return "unknown";
    const text = readTaskText(stdout);
    if (code !== 0 || isOthersTask(text, record)) return "gone";
    const settings = /<Settings>[^]*<\/Settings>/.exec(text)?.[0] ?? "";
    return settings.includes("<Enabled>false</Enabled>") ? "paused" : "active";
  },
};

const DRIVERS: Readonly<Record<Scheduler, SchedulerDriver>> = {
  cron: CRON_DRIVER,
  systemd: SYSTEMD_DRIVER,
  launchd: LAUNCHD_DRIVER,
  schtasks: SCHTASKS_DRIVER,
};

/** The system that units are for: this one, or the one that a test names. */
function readPlatform(): string {
  return readEnv("AUTOMATON_PLATFORM") ?? Deno.build.os;
}

/** This machine, with every command bounded and its words in English. */
function makeHost(scratchDir: string): SchedulerHost {
  const home = readEnv("HOME") ?? readEnv("USERPROFILE") ?? Deno.cwd();
  return {
    run: (argv) => runCommand(argv, { env: { LC_ALL: "C" }, timeoutMs: SCHEDULER_TIMEOUT_MS }),
    sleep,
    home,
    uid: Deno.uid(),
    unitDir: join(home, ".config", "systemd", "user"),
    scratchDir,
  };
}

/** What the systemd of this person's session answers, or why there is none. */
async function askSystemd(
  host: SchedulerHost,
): Promise<{ host: SchedulerHost; problem: string | null }> {
  const argv = systemctl("show-environment");
  const outcome = await host.run(argv);
  if (outcome.code !== 0) return { host, problem: explainOutcome(argv, outcome) };
  const text = new TextDecoder().decode(outcome.stdout);
  const config = /^XDG_CONFIG_HOME=(\/.*)$/m.exec(text)?.[1];
  const unitDir = config === undefined ? host.unitDir : join(config, "systemd", "user");
  return { host: { ...host, unitDir }, problem: null };
}

/** The scheduler that this system has, with the host as that scheduler sees it. */
async function chooseScheduler(
  host: SchedulerHost,
): Promise<{ scheduler: Scheduler; host: SchedulerHost }> {
  const platform = readPlatform();
  if (platform === "darwin") return { scheduler: "launchd", host };
  if (platform === "windows") return { scheduler: "schtasks", host };
  const systemd = platform === "linux" ? await askSystemd(host) : { host, problem: "not Linux" };
  if (systemd.problem === null) return { scheduler: "systemd", host: systemd.host };
  try {
    await readCrontab(host);
  } catch (error) {
    throw new RefusedError(
      `Cannot find a scheduler: no systemd session (${systemd.problem}) and no crontab (${
        (error as Error).message.replace(/^Cannot read the crontab: /, "")
      })`,
      "install cron (Debian: apt-get install cron), or use loop-runner --mode daemon",
    );
  }
  return { scheduler: "cron", host };
}

const schedulePath = (dir: string): string => join(dir, "schedule.json");

// deno-fmt-ignore -- a table: one row a line.
const SCHEDULE_RULES: readonly FieldRule[] = [
  ["scheduler", `one of ${SCHEDULERS.join(", ")}`, isOneOf(SCHEDULERS), "required"],
  ["interval_seconds", "a whole number", isCount, "required"],
  ["exact", "true or false", (v) => typeof v === "boolean", "required"],
  ["period_seconds", "a whole number", isCount, "required"],
  ["unit", "a text", isText, "required"],
  ["files", "a list of paths", isListOf(isText), "required"],
  ["script", "a path", isText, "required"],
  ["runner", "a list of texts", isArgv, "required"],
  ["log", "a path", isText, "required"],
  ["path", "a text", isText, "required"],
  ["context_tokens", "a text or null", isTextOrNull, "required"],
  ["agent", "a path or null", isTextOrNull, "required"],
  ["installed_at", "a time", isTimeOrNull, "required"],
  ["paused", "true or false", (v) => typeof v === "boolean", "required"],
  ["domain", "a text", isText],
  ["replaces", "a record", isRecord],
  ["newline_added_after", "a text", isText],
];

/** What was installed for a loop; null where nothing was. */
function readSchedule(dir: string): ScheduleRecord | null {
  const path = schedulePath(dir);
  const text = readTextIfPresent(path);
  if (text === null) return null;
  try {
    const record = parseSchedule(text, path);
    return isCopiedRecord(record, dir) ? null : record;
  } catch (error) {
    if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
    throw new RefusedError(error.message, hintForRecord(dir));
  }
}

function parseSchedule(text: string, path: string): ScheduleRecord {
  const parsed = parseJsonText(text, path);
  checkSchemaVersion(parsed, path);
  let each: unknown = parsed;
  while (each !== undefined) {
    checkFields(each, SCHEDULE_RULES, path);
    each = each.replaces;
  }
  return parsed as unknown as ScheduleRecord;
}

/** What a person does about a record that cannot be read: the next installation finds the unit again. */
function hintForRecord(dir: string): string {
  return `remove ${schedulePath(dir)}, then status --install-schedule ${basename(dir)}`;
}

/** True for a record that came along when a project was copied: it is still another loop's. */
function isCopiedRecord({ log }: ScheduleRecord, dir: string): boolean {
  const origin = dirname(log);
  if (origin === dir || !existsSync(schedulePath(origin))) return false;
  return Deno.realPathSync(origin) !== Deno.realPathSync(dir);
}

/** A loop and the record of its schedule, read once. */
interface ScheduledLoop {
  readonly view: LoopView;
  readonly record: ScheduleRecord | null;
  /** Why there is no record although there is a file of it. */
  readonly problem: string | null;
}

/** Reads a record for lists and reports, which a damaged one must not end. */
function viewSchedule(view: LoopView): ScheduledLoop {
  try {
    return { view, record: readSchedule(view.dir), problem: null };
  } catch (error) {
    return { view, record: null, problem: (error as Error).message };
  }
}

function saveSchedule(dir: string, record: ScheduleRecord): void {
  writeFileAtomic(schedulePath(dir), `${JSON.stringify(record, null, 2)}\n`);
}

/** The folder of the installed programs. */
function programDir(framework: string): string {
  return Deno.build.standalone
    ? dirname(Deno.realPathSync(Deno.execPath()))
    : join(framework, "bin");
}

/** Words that start a sibling: compiled beside this program, installed in bin/, else its source. */
function findProgram(framework: string, name: "loop-runner" | "status" | "vram-detect"): string[] {
  const ending = Deno.build.os === "windows" ? ".exe" : "";
  const installed = join(programDir(framework), name + ending);
  if (Deno.build.standalone || existsSync(installed)) return [installed];
  const script = join(framework, "scripts", `${name}.ts`);
  return [Deno.execPath(), "run", "-q", "--no-prompt", `-P=${name}`, script];
}

/** PATH as a unit can have it: folders named in full, each once. */
export function cleanPath(path: string): string {
  if (Deno.build.os === "windows") return path;
  const folders = path.split(":").filter((folder) =>
    // deno-lint-ignore no-control-regex -- a folder that no unit file can name is left out.
    folder.startsWith("/") && !/[\u0000-\u001f\u007f]/.test(folder) && folder.isWellFormed()
  );
  return [...new Set(folders)].join(":");
}

function isExecutable(path: string): boolean {
  try {
    const { isFile, mode } = Deno.statSync(path);
    return isFile && (mode === null || (mode & 0o111) !== 0);
  } catch {
    return false; // Missing or out of reach: it cannot be run.
  }
}

/**
 * Finds an agent's executable.
 *
 * @param command Its name, a path, or a path with the tokens that loop.json allows.
 * @param path Folders to look in.
 * @returns Its full path, or null where there is none that can be run.
 */
export function findExecutable(
  command: string,
  { path, tokens }: { path: string; tokens: Readonly<Record<string, string>> },
): string | null {
  const word = command.replace(/\{(\w+)\}/g, (token, name: string) => tokens[name] ?? token);
  const isWindows = Deno.build.os === "windows";
  const endings = isWindows ? ["", ".exe", ".cmd", ".bat"] : [""];
  const isPath = word.includes("/") || (isWindows && word.includes("\\"));
  const folders = isPath ? [tokens.cwd ?? "/"] : path.split(isWindows ? ";" : ":");
  for (const folder of folders) {
    for (const ending of endings) {
      const candidate = resolve(folder, word + ending);
      if (isExecutable(candidate)) return candidate;
    }
  }
  return null;
}

/** The programs that a loop's roles start, each once. */
function listAgents(config: LoopConfig): string[] {
  const shared = config.harness?.command?.[0] ?? "opencode";
  const { implement, verify, orchestrate } = config.roles ?? {};
  const roles = [implement, verify, ...(orchestrate ? [orchestrate] : [])];
  return [...new Set(roles.map((role) => role?.command?.[0] ?? shared))];
}

/** Each agent of a loop with its executable on a PATH, or null where it has none there. */
function resolveAgents(
  { framework, project }: ProjectPlace,
  { dir, config, path }: { dir: string; config: LoopConfig; path: string },
): Map<string, string | null> {
  const tokens = { framework, cwd: project, loop_dir: dir };
  const searched = config.harness?.env?.PATH ?? path;
  return new Map(
    listAgents(config).map((agent) => [agent, findExecutable(agent, { path: searched, tokens })]),
  );
}

/** Seconds that a tick may take before its scheduler ends it: well above what its harnesses may. */
function limitTick(config: LoopConfig): number | null {
  const timeoutS = config.harness?.timeout_seconds ?? 3600;
  return timeoutS === 0 ? null : Math.max(86_400, Math.ceil(4 * timeoutS));
}

/** Reads the interval that is asked for: the flag, else loop.json's; under a minute is refused. */
function readScheduleInterval(invocation: Invocation, config: LoopConfig, loop: string): number {
  const flag = readWholeNumber(invocation.given, "interval", { min: 1, max: MAX_INTERVAL_S });
  const intervalS = flag ?? config.schedule?.interval_seconds ?? LOOP_DEFAULTS.intervalSeconds;
  if (intervalS > MAX_INTERVAL_S) {
    throw new RefusedError(
      `Cannot schedule loop "${loop}" every ${intervalS} s: a scheduler takes ${MAX_INTERVAL_S} s or less`,
      `add --interval ${MAX_INTERVAL_S}`,
    );
  }
  if (intervalS >= MIN_INTERVAL_S) return intervalS;
  throw new RefusedError(
    `Cannot schedule loop "${loop}" every ${intervalS} s: a scheduler takes ${MIN_INTERVAL_S} s or more`,
    `loop-runner --mode daemon --loop ${loop} --interval ${intervalS}`,
  );
}

/** Reads which scheduler is asked for: the flag, else loop.json's; null where any will do. */
function readWantedScheduler(
  invocation: Invocation,
  config: LoopConfig,
): Scheduler | PrintedScheduler | null {
  const flag = optionalText(invocation, "scheduler");
  const known = [...SCHEDULERS, ...PRINTED_SCHEDULERS];
  const found = known.find((name) => name === (flag ?? config.schedule?.kind));
  if (found !== undefined || flag === null) return found ?? null;
  const nearest = findNearest(flag, known);
  throw new UsageError(
    `Cannot use flag "--scheduler": "${flag}" is none of ${known.join(", ")}${
      nearest === null ? "" : ` (did you mean ${nearest}?)`
    }`,
  );
}

/** Puts together what is to be scheduled; the unit has its plain name. */
function makeJob(
  invocation: Invocation,
  { loop, dir, config, plan }: {
    loop: string;
    dir: string;
    config: LoopConfig;
    plan: SchedulePlan;
  },
): ScheduleJob {
  const { framework, project } = invocation;
  const environment = dueEnvironment(plan);
  // What a person's shell sets and no scheduler knows.
  for (const name of ["AUTOMATON_CONTEXT_TOKENS", "AUTOMATON_HOME"]) {
    const value = readEnv(name);
    if (value !== undefined) environment[name] = checkUnitValue(name, value);
  }
  const runner = findProgram(framework, "loop-runner");
  for (const path of [project, dir, ...runner]) checkUnitValue("path", path);
  return {
    loop,
    project,
    plan,
    timeoutS: limitTick(config),
    path: cleanPath(readEnv("PATH") ?? ""),
    environment,
    runner,
    script: join(dir, "automaton-loop-tick.sh"),
    log: join(dir, "schedule.log"),
    unit: loop,
  };
}

/** The first eight hexadecimal digits of a text's SHA-256. */
async function shortHash(text: string): Promise<string> {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  return [...new Uint8Array(digest, 0, 4)].map((byte) => byte.toString(16).padStart(2, "0"))
    .join("");
}

/** The unit that a loop has, or gets: its plain name unless another project's loop has taken it. */
async function nameUnit({ job, scheduler, host, found }: Installation): Promise<string> {
  if (found?.scheduler === scheduler && found.script === job.script) return found.unit;
  const driver = DRIVERS[scheduler];
  const unit = driver.nameUnit(job.loop);
  if (!(await driver.isTaken({ ...job, unit }, host))) return unit;
  return `${unit}-${await shortHash(job.script)}`;
}

/** Warnings about a schedule that is in place and may yet not do what is expected. */
async function listScheduleWarnings(
  scheduler: Scheduler,
  job: ScheduleJob,
  host: SchedulerHost,
): Promise<string[]> {
  if (scheduler === "cron" && await isCronRunning(host) === false) {
    return ["no cron process runs, so nothing will fire until one is started"];
  }
  if (scheduler === "systemd" && await isLingering(host) === false) {
    return ["lingering is off: the timer stops at logout; loginctl enable-linger keeps it"];
  }
  if (scheduler === "schtasks" && job.runner.concat(job.project).some((w) => w.includes("%"))) {
    return ["a path holds %, which the task scheduler may read as a variable"];
  }
  if (scheduler === "launchd") {
    const guarded = ["Documents", "Desktop", "Downloads"].map((name) => join(host.home, name));
    const found = guarded.find((folder) => pathBelow(folder, job.project) !== null);
    if (found !== undefined) {
      return [`macOS asks before a background job may read ${found}; move the project elsewhere`];
    }
  }
  return [];
}

/** True where a cron daemon runs; null where that cannot be told. */
async function isCronRunning(host: SchedulerHost): Promise<boolean | null> {
  const argv = readPlatform() === "linux"
    ? ["sh", "-c", "cat /proc/[0-9]*/comm 2>/dev/null; :"]
    : ["ps", "-A", "-o", "comm="];
  const { code, stdout } = await host.run(argv);
  const names = new TextDecoder().decode(stdout).split("\n").map((line) => basename(line.trim()));
  if (code !== 0 || names.length < 2) return null;
  if (names.some((name) => ["cron", "crond", "fcron", "bcron-sched", "dcron"].includes(name))) {
    return true;
  }
  // systemd-cron has no daemon: its generator makes timers of the tables.
  return (await host.run(["systemctl", "is-active", "--quiet", "cron.target"])).code === 0;
}

/** True where a person's timers go on after logout; null where that cannot be told. */
async function isLingering(host: SchedulerHost): Promise<boolean | null> {
  const user = readEnv("USER") ?? readEnv("LOGNAME") ?? `${host.uid}`;
  const { code, stdout } = await host.run([
    "loginctl",
    "show-user",
    user,
    "--property=Linger",
    "--value",
  ]);
  const answer = new TextDecoder().decode(stdout).trim();
  return code !== 0 || answer === "" ? null : answer === "yes";
}

async function runInstallSchedule(invocation: Invocation): Promise<Answer> {
  const loop = readText(invocation, "install-schedule");
  const dir = findLoopDir(invocation.project, loop);
  const config = readLoopConfig(dir);
  const wanted = readWantedScheduler(invocation, config);
  const isDryRun = invocation.given.has("dry-run");
  const printed = PRINTED_SCHEDULERS.find((name) => name === wanted);
  if (printed !== undefined) {
    if (isDryRun) return printForeignUnit(invocation, { loop, dir, config, scheduler: printed });
    throw new UsageError(
      `Cannot install a schedule in ${printed} from here: --dry-run prints what to give to it`,
    );
  }
  const intervalS = readScheduleInterval(invocation, config, loop);
  const prepare = async (): Promise<Installation> => {
    const found = readSchedule(dir);
    const { scheduler, host } = await findScheduler(dir, wanted as Scheduler | null, found);
    const plan = planSchedule(intervalS, scheduler);
    const job = makeJob(invocation, { loop, dir, config, plan });
    const agents = resolveAgents(invocation, { dir, config, path: job.path });
    return { job, scheduler, host, dir, agents, found };
  };
  if (isDryRun) {
    const draft = await prepare();
    const job = { ...draft.job, unit: await nameUnit(draft) };
    return printUnits(job, draft.scheduler, draft.host);
  }
  return await withLoopLock(invocation, loop, async () => {
    const state = await loadLoopState(invocation, dir);
    return await installSchedule(state, await prepare());
  });
}

/** The scheduler that is asked for, else the one in use, else the one that this system has. */
async function findScheduler(
  dir: string,
  wanted: Scheduler | null,
  before: ScheduleRecord | null,
): Promise<{ scheduler: Scheduler; host: SchedulerHost }> {
  const host = makeHost(dir);
  const named = wanted ?? before?.scheduler;
  if (named === undefined) return await chooseScheduler(host);
  if (named !== "systemd") return { scheduler: named, host };
  return { scheduler: named, host: (await askSystemd(host)).host };
}

function printForeignUnit(
  invocation: Invocation,
  { loop, dir, config, scheduler }: {
    loop: string;
    dir: string;
    config: LoopConfig;
    scheduler: PrintedScheduler;
  },
): Answer {
  const intervalS = readScheduleInterval(invocation, config, loop);
  if (scheduler === "github-actions" && intervalS < MIN_WORKFLOW_INTERVAL_S) {
    throw new RefusedError(
      `Cannot schedule loop "${loop}" every ${intervalS} s: GitHub starts workflows every 300 s at most`,
      `add --interval ${MIN_WORKFLOW_INTERVAL_S}`,
    );
  }
  const plan = planSchedule(intervalS, scheduler);
  const job = makeJob(invocation, { loop, dir, config, plan });
  const content = scheduler === "kubernetes" ? renderCronJob(job) : renderWorkflow(job);
  const path = scheduler === "kubernetes"
    ? `${nameCronJob(loop)}.yaml`
    : `.github/workflows/automaton-loop-${loop}.yml`;
  return answerDryRun(job, scheduler, { units: [{ path, content }], others: [] });
}

function printUnits(job: ScheduleJob, scheduler: Scheduler, host: SchedulerHost): Answer {
  const script = { path: job.script, content: renderTickScript(job) };
  return answerDryRun(job, scheduler, {
    units: DRIVERS[scheduler].render(job, host),
    others: scheduler === "schtasks" ? [] : [script],
  });
}

/** Shows units: one alone as it is, so that it can be piped on; several with their names. */
function answerDryRun(
  { loop, plan, unit }: ScheduleJob,
  scheduler: Scheduler | PrintedScheduler,
  { units, others }: { units: readonly UnitFile[]; others: readonly UnitFile[] },
): Answer {
  const json = {
    ok: true,
    dry_run: true,
    loop,
    scheduler,
    interval_seconds: plan.intervalS,
    exact: plan.isExact,
    period_seconds: plan.periodMin * 60,
    unit,
    files: [...units, ...others],
  };
  const texts = units.length === 1
    ? [units[0]!.content]
    : units.map(({ path, content }) => `# ${path}\n${content}`);
  return { json, text: texts.join("\n").trimEnd() };
}

/** What is to be installed, and where; the job's unit has its plain name. */
interface Installation {
  readonly job: ScheduleJob;
  readonly scheduler: Scheduler;
  readonly host: SchedulerHost;
  readonly dir: string;
  readonly agents: ReadonlyMap<string, string | null>;
  /** What is recorded before. */
  readonly found: ScheduleRecord | null;
}

/** Writes the script, has the scheduler start it, proves that it will, and takes away what was before. */
async function installSchedule(state: LoopState, draft: Installation): Promise<Answer> {
  const { scheduler, host, dir, agents } = draft;
  // cron takes the lock itself: there no unit's name can be taken.
  let { job, record } = scheduler === "cron"
    ? await placeUnit(draft)
    : await withHomeLock(host, () => placeUnit(draft));
  logEvent(dir, "INFO", "SCHEDULED", { scheduler, interval_seconds: job.plan.intervalS });
  const warnings = await listScheduleWarnings(scheduler, job, host);
  const { replaces, ...rest } = record;
  try {
    if (replaces !== undefined) await removeUnits(replaces, host);
    record = rest;
  } catch (error) {
    warnings.push(
      `the schedule before stays (${replaces!.scheduler}): ${(error as Error).message}`,
    );
  }
  saveSchedule(dir, record);
  if (state.status !== "running") {
    await DRIVERS[scheduler].pause(record, host, true);
    record = { ...record, paused: true };
    saveSchedule(dir, record);
  }
  return answerInstalled(job, { record, state, agents, warnings });
}

/** Names the unit and has the scheduler take it; where that fails all is as it was. */
async function placeUnit(
  draft: Installation,
): Promise<{ job: ScheduleJob; record: ScheduleRecord }> {
  const { scheduler, host, dir, found } = draft;
  const job = { ...draft.job, unit: await nameUnit(draft) };
  if (scheduler === "schtasks") {
    const argv = schtasks("query", job.unit);
    const outcome = await host.run(argv);
    // Without any answer nothing could be taken back either.
    if (outcome.code === null) throw makeSchedulerError(argv, outcome);
  }
  const record = await makeRecord(job, draft);
  const before = new Map(
    [job.script, ...record.files, ...record.files.map(disabledPath)]
      .map((path) => [path, readTextIfPresent(path)]),
  );
  if (scheduler !== "schtasks") writeTickScript(job.script, renderTickScript(job));
  // Before the unit: what is cut short here is found again and taken away by --uninstall-schedule.
  saveSchedule(dir, record);
  try {
    const installed = { ...record, ...await DRIVERS[scheduler].install(job, host) };
    saveSchedule(dir, installed);
    return { job, record: installed };
  } catch (error) {
    await undoInstall({ record, found, before, host, dir, error });
    throw error;
  }
}

/** @throws {RefusedError} Where a unit cannot be rendered; nothing has been changed then. */
async function makeRecord(
  job: ScheduleJob,
  { scheduler, host, agents, found }: Installation,
): Promise<ScheduleRecord> {
  const rendered = DRIVERS[scheduler].render(job, host);
  const files = rendered.map(({ path }) => path).filter(isAbsolute);
  const newline = scheduler === "cron" ? found?.newline_added_after : undefined;
  const replaces = found !== null && isSameUnit(found, { ...job, scheduler })
    ? found.replaces
    : found ?? undefined;
  return {
    schema_version: 1,
    scheduler,
    interval_seconds: job.plan.intervalS,
    exact: job.plan.isExact,
    period_seconds: job.plan.periodMin * 60,
    unit: job.unit,
    files,
    script: job.script,
    runner: job.runner,
    log: job.log,
    path: job.path,
    context_tokens: job.environment.AUTOMATON_CONTEXT_TOKENS ?? null,
    agent: [...agents.values()][0] ?? null,
    installed_at: new Date().toISOString(),
    paused: false,
    ...(scheduler === "launchd" ? { domain: await findLaunchdDomain(host) } : {}),
    ...(newline === undefined ? {} : { newline_added_after: newline }),
    ...(replaces === undefined ? {} : { replaces }),
  };
}

function writeTickScript(path: string, text: string): void {
  writeFileAtomic(path, text);
  Deno.chmodSync(path, 0o755);
}

type UnitName = Pick<ScheduleRecord, "scheduler" | "unit" | "script">;

const isSameUnit = (a: UnitName, b: UnitName): boolean =>
  a.scheduler === b.scheduler && a.unit === b.unit && a.script === b.script;

/** Takes back an installation that failed; what cannot be taken back stays recorded. */
async function undoInstall({ record, found, before, host, dir, error }: {
  record: ScheduleRecord;
  found: ScheduleRecord | null;
  /** The texts of the script and the files; null for what was not there. */
  before: ReadonlyMap<string, string | null>;
  host: SchedulerHost;
  dir: string;
  error: unknown;
}): Promise<void> {
  try {
    const isChange = found !== null && isSameUnit(found, record);
    if (!isChange && !(await isTakenBack(record, host, error))) {
      const again = `status --uninstall-schedule ${basename(dir)}`;
      throw new Error(`${record.scheduler} may still have ${record.unit}; ${again} tries again`);
    }
    for (const [path, text] of before) {
      if (text === null) removeIfPresent(path);
      else writeFileAtomic(path, text);
    }
    if (existsSync(record.script)) Deno.chmodSync(record.script, 0o755);
    if (found === null) removeIfPresent(schedulePath(dir));
    else saveSchedule(dir, found);
    if (isChange) await restoreUnit(found, host);
  } catch (problem) {
    console.error(`warning: Cannot take back the schedule: ${(problem as Error).message}`);
  }
}

/** Takes away what an installation that failed has made; false where some of it may be there yet. */
async function isTakenBack(
  record: ScheduleRecord,
  host: SchedulerHost,
  error: unknown,
): Promise<boolean> {
  const driver = DRIVERS[record.scheduler];
  if (record.scheduler === "cron") {
    // Nobody writes a crontab again that could not be put back.
    return !(error instanceof CrontabLostError) || await driver.inspect(record, host) === "gone";
  }
  try {
    await driver.remove(record, host);
  } catch {
    // What is left of it is what counts.
  }
  return await driver.inspect(record, host) === "gone";
}

/** Has a scheduler take a unit as it was, once its files are; cron and Windows change all or nothing. */
async function restoreUnit(record: ScheduleRecord, host: SchedulerHost): Promise<void> {
  const { scheduler, unit, paused } = record;
  if (scheduler === "systemd") {
    const verb = paused ? "stop" : "restart";
    for (const words of [["daemon-reload"], [paused ? "disable" : "enable", `${unit}.timer`]]) {
      await host.run(systemctl(...words)); // Where it fails systemd has the unit as it was.
    }
    await runScheduler(host, systemctl(verb, `${unit}.timer`));
  }
  if (scheduler !== "launchd") return;
  if (paused) await LAUNCHD_DRIVER.pause(record, host, true);
  else await LAUNCHD_DRIVER.resume(record, host);
}

function answerInstalled(
  { loop, plan, unit }: ScheduleJob,
  { record, state, agents, warnings }: {
    record: ScheduleRecord;
    state: LoopState;
    agents: ReadonlyMap<string, string | null>;
    warnings: string[];
  },
): Answer {
  const lastSlotMs = state.last_slot ? Date.parse(state.last_slot) : null;
  const fires = listNextFires(plan, { fromMs: Date.now(), lastSlotMs, count: 3 });
  for (const [agent, path] of agents) {
    if (path === null) warnings.push(`agent "${agent}" is not found on the PATH of the schedule`);
  }
  for (const warning of warnings) console.error(`warning: ${warning}`);
  const { scheduler, paused, agent } = record;
  const lines = [
    `scheduled loop ${loop} ${describeInterval(plan.intervalS)} (${scheduler}: ${unit})`,
    paused ? `paused, since the loop is ${describeStatus(state)}` : "next ticks:",
    ...(paused ? [] : fires.map((at) => `  ${formatLocalTime(at)}`)),
    `agent: ${agent ?? "not found"}`,
  ];
  const json = {
    ok: true,
    loop,
    ...record,
    schema_version: 1,
    next_fires: paused ? [] : fires.map((at) => new Date(at).toISOString()),
    warnings,
  };
  return {
    json,
    text: lines.join("\n"),
    ...(paused ? { hint: hintForStandstill(loop, state) } : {}),
  };
}

/** Takes a loop's unit away from its scheduler, and what it replaces; the script and the record stay. */
async function removeUnits(record: ScheduleRecord, host: SchedulerHost): Promise<void> {
  if (record.replaces !== undefined) await removeUnits(record.replaces, host);
  await DRIVERS[record.scheduler].remove(record, host);
}

/** Takes a loop's schedule away whole, but for its log; nothing where none is recorded. */
async function removeSchedule(dir: string): Promise<ScheduleRecord | null> {
  const record = readSchedule(dir);
  if (record === null) return null;
  await removeUnits(record, makeHost(dir));
  removeIfPresent(join(dir, "automaton-loop-tick.sh"));
  removeIfPresent(schedulePath(dir));
  logEvent(dir, "INFO", "UNSCHEDULED", { scheduler: record.scheduler });
  return record;
}

async function runUninstallSchedule(invocation: Invocation): Promise<Answer> {
  const loop = readText(invocation, "uninstall-schedule");
  return await withLoopLock(invocation, loop, async (dir) => {
    const record = await removeSchedule(dir);
    const json = { ok: true, loop, removed: record !== null, scheduler: record?.scheduler ?? null };
    const text = record === null
      ? `loop ${loop} has no schedule`
      : `took the schedule of loop ${loop} away (${record.scheduler}: ${record.unit})`;
    return { json, text };
  });
}

/** Takes the schedule of a loop away that is removed itself; a failure keeps the loop, unless forced. */
async function removeScheduleOf(loop: string, dir: string, isForced: boolean): Promise<void> {
  try {
    await removeSchedule(dir);
  } catch (error) {
    const words = (error as Error).message;
    if (!isForced) {
      throw new RefusedError(
        `Cannot remove loop "${loop}": its schedule stays: ${words}`,
        `status --uninstall-schedule ${loop}, or add --force and take the unit away by hand`,
      );
    }
    console.error(`warning: the schedule of loop ${loop} stays: ${words}`);
  }
}

/**
 * Stops a loop's schedule or starts it again, where one is recorded. The state has been changed by then and
 * decides alone, so a failure is only a warning.
 *
 * @param mayEndTick False while a tick of the loop may be running.
 */
async function switchSchedule(
  dir: string,
  to: "pause" | "resume",
  mayEndTick = readEnv("AUTOMATON_NO_LOOP_LOCK") !== "1",
): Promise<void> {
  try {
    const record = readSchedule(dir);
    if (record === null || (to === "pause" && record.paused)) return;
    const [driver, host] = [DRIVERS[record.scheduler], makeHost(dir)];
    if (to === "pause") {
      await driver.pause(record, host, mayEndTick);
      saveSchedule(dir, { ...record, paused: true });
      return;
    }
    const resumed = { ...record, ...await driver.resume(record, host), paused: false };
    saveSchedule(dir, resumed);
    const presence = await driver.inspect(resumed, host);
    if (presence === "active" || presence === "unknown") return;
    const found = presence === "gone" ? "does not know it any more" : "has it disabled";
    throw new Error(
      `${record.scheduler} ${found}; status --install-schedule ${basename(dir)} makes it anew`,
    );
  } catch (error) {
    const message = `Cannot ${to} the schedule: ${(error as Error).message}`;
    logEvent(dir, "WARNING", "WARNING", { message });
    console.error(`warning: ${message}`);
  }
}

/** What a list of loops says about a schedule; null where there is none. */
function summarizeSchedule(record: ScheduleRecord | null): Record<string, unknown> | null {
  if (record === null) return null;
  const { scheduler, interval_seconds, exact, period_seconds, unit, paused } = record;
  return { scheduler, interval_seconds, exact, period_seconds, unit, paused };
}

function describeSchedule(record: ScheduleRecord): string {
  const interval = describeInterval(record.interval_seconds);
  return `${interval} (${record.paused ? "paused, " : ""}${record.scheduler})`;
}

/** What the audit says where a schedule is recorded that its scheduler does not know any more. */
async function findLostSchedule(
  record: ScheduleRecord | null,
  dir: string,
): Promise<string | null> {
  if (record === null) return null;
  const presence = await DRIVERS[record.scheduler].inspect(record, makeHost(dir));
  return presence === "gone" ? `${record.scheduler} does not know ${record.unit} any more` : null;
}

/** The names of a loop's logs that its scheduler writes. */
function listScheduleLogs(dir: string): string[] {
  return listNames(dir).filter((name) => name.startsWith("schedule.log"));
}

// --- Commands ---

function runCreateTask(invocation: Invocation): Answer {
  const { project } = invocation;
  const name = checkName("task", readText(invocation, "create-task"));
  if (name === "complete") {
    throw new UsageError('Cannot use task name "complete": finished tasks live there');
  }
  const phase = checkWord(
    "phase",
    optionalText(invocation, "phase") ?? "research",
    PHASES.filter((known) => known !== "complete"),
  );
  const actor = describeActor();
  if (actor !== "person" && phase !== "research") {
    throw new RefusedError(
      `Cannot create task "${name}" in ${phase}: only a person may; a loop's tasks start in research`,
      `status --create-task ${name}`,
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
  const isApproved = phaseIndex(phase) >= phaseIndex("implement");
  const task: TaskState = {
    schema_version: 1,
    name,
    title: optionalLine(invocation, "title") ?? name,
    phase,
    previous_phase: null,
    created_at: now,
    updated_at: now,
    approved_at: isApproved ? now : null,
    claimed_by: null,
    loop: null,
    history: [{ at: now, from: null, to: phase, by: actor, reason: null }],
  };
  const dir = join(tasksDir(project), name);
  createFolderWhole(dir, (making) => saveState(join(making, ".state"), task));
  const json = { ok: true, task: name, phase, dir };
  return { json, text: `created task ${name} in ${phase}: ${dir}` };
}

function runShowTask(invocation: Invocation): Answer {
  const { dir, task } = readTask(invocation.project, readText(invocation, "task"));
  const document = PHASE_DOCUMENTS[task.phase] ?? null;
  const hasDocument = document !== null && isDocumentWritten(join(dir, document));
  const json = {
    ...task,
    dir,
    document,
    has_document: hasDocument,
    next_phase: nextPhase(task.phase),
    needs_approval: task.phase === "spec" && task.approved_at === null,
  };
  const rows = [
    ["  phase", task.phase],
    ["  document", document === null ? "-" : `${document} (${hasDocument ? "there" : "missing"})`],
    ["  approved", task.approved_at ?? "no"],
    ["  loop", task.loop ?? "-"],
    ["  claimed by", task.claimed_by ?? "-"],
    ["  folder", dir],
  ];
  const steps = task.history.map(({ at, from, to, by, reason }) =>
    `  ${at}  ${from ?? "(new)"} -> ${to}  by ${by}${reason === null ? "" : `: ${reason}`}`
  );
  const lines = [`${task.name}: ${task.title}`, renderColumns(rows), "history:", ...steps];
  return { json, text: lines.join("\n") };
}

async function runTransition(invocation: Invocation): Promise<Answer> {
  const target = checkWord("transition", readText(invocation, "transition"), [
    ...PHASES,
    WAITING_PHASE,
  ]);
  const name = readText(invocation, "task");
  const reason = optionalLine(invocation, "reason");
  const { dir, task } = await updateTask(invocation.project, name, (task, taskDir) => {
    const halted = findHaltedOwner(invocation.project, task);
    if (halted !== null) {
      throw new RefusedError(
        `Cannot move task "${name}" to ${target}: loop ${halted}, which owns it, is halted`,
        `status --approve --loop ${halted}`,
      );
    }
    const document = PHASE_DOCUMENTS[task.phase];
    const hasDocument = document !== undefined && isDocumentWritten(join(taskDir, document));
    const refusal = refuseStep(task, target, { hasDocument, reason });
    if (refusal !== null) throw refusal;
    findPlace(invocation.project, { ...task, phase: target }, taskDir);
    useUpOperation();
    moveTask(task, target, reason);
  });
  const json = { ok: true, task: name, from: task.previous_phase, phase: task.phase, dir };
  return { json, text: `${name}: ${task.previous_phase} -> ${task.phase}` };
}

/** Writes a step into a task: phase, history, and what the step undoes. */
function moveTask(task: TaskState, target: string, reason: string | null): void {
  const now = new Date().toISOString();
  task.history.push({ at: now, from: task.phase, to: target, by: describeActor(), reason });
  task.previous_phase = task.phase;
  task.phase = target;
  const isBeforeApproval = phaseIndex(target) >= 0 &&
    phaseIndex(target) < phaseIndex("implement");
  // A specification that is opened again has to be approved again.
  if (isBeforeApproval) task.approved_at = null;
  if (target === "complete" || target === WAITING_PHASE) task.loop = null;
}

/** An orchestrate session may take one step a tick: the first makes the file, a second finds it. */
function useUpOperation(): void {
  if (readEnv("AUTOMATON_ROLE") !== "orchestrate") return;
  const path = readEnv("AUTOMATON_OP_FILE");
  if (path === undefined) {
    throw new RefusedError(
      "Cannot take a step as orchestrate: AUTOMATON_OP_FILE is not set",
      "let a tick start the session",
    );
  }
  try {
    Deno.openSync(path, { write: true, createNew: true }).close();
  } catch (error) {
    if (!(error instanceof Deno.errors.AlreadyExists)) throw error;
    throw new RefusedError(
      "Cannot take a second step: this tick has had its one status command",
      "end the session; the next tick goes on",
    );
  }
}

async function runApprove(invocation: Invocation): Promise<Answer> {
  const [task, loop] = [optionalText(invocation, "task"), optionalText(invocation, "loop")];
  if ((task === null) === (loop === null)) {
    throw new UsageError('Cannot run "--approve": give either --task or --loop');
  }
  return task === null
    ? await approveLoop(invocation, readText(invocation, "loop"))
    : await approveTask(invocation, task);
}

async function approveTask({ project }: Invocation, name: string): Promise<Answer> {
  const { task } = await updateTask(project, name, (task, dir) => {
    const refuse = (why: string, hint: string) =>
      new RefusedError(`Cannot approve task "${name}": ${why}`, hint);
    const isWaiting = task.phase === WAITING_PHASE;
    const phase = isWaiting ? task.previous_phase ?? "research" : task.phase;
    const isAtGate = phase === "spec" && isDocumentWritten(join(dir, "SPEC.md"));
    if (isWaiting) {
      if (phaseIndex(phase) < 0) throw refuse(`it came from "${phase}"`, "status --audit");
      const approvedBefore = task.approved_at;
      moveTask(task, isAtGate ? "implement" : phase, "approved");
      task.approved_at = isAtGate ? new Date().toISOString() : approvedBefore;
      return;
    }
    if (phase !== "spec") {
      throw refuse(`in ${phase} there is nothing to approve`, `status --task ${name}`);
    }
    if (!isAtGate) throw refuse("SPEC.md is missing or empty", "write SPEC.md first");
    if (task.approved_at !== null) {
      const hint = `status --transition implement --task ${name}`;
      throw refuse(`it was approved at ${task.approved_at}`, hint);
    }
    task.approved_at = new Date().toISOString();
  });
  const answer = {
    json: { ok: true, task: name, phase: task.phase, approved_at: task.approved_at },
    text: `approved task ${name}: now in ${task.phase}`,
  };
  if (task.phase === "spec") {
    return { ...answer, hint: `status --transition implement --task ${name}` };
  }
  const idle = listLoops(project).find(isWaitingForTask);
  if (idle === undefined) return answer;
  return { ...answer, hint: `status --claim-loop-task ${idle.name} --task ${name}` };
}

/** True for a loop that only works on what a person gives it, and has nothing. */
function isWaitingForTask({ dir, state }: LoopView): boolean {
  const kind = readConfigOrNull(dir)?.work_source?.kind ?? "single";
  return state?.status === "running" && state.current_task === null && kind === "single";
}

async function runClaim(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "task");
  const session = optionalLine(invocation, "session");
  await updateTask(invocation.project, name, (task) => {
    const refuse = (why: string, hint: string) =>
      new RefusedError(`Cannot claim task "${name}": ${why}`, hint);
    if (task.phase === "complete") throw refuse("it is complete", "status --create-task NAME");
    const loop = findOwner(invocation.project, task);
    if (loop !== null) throw refuse(`loop ${loop} has it`, "status --loop-list");
    if (task.claimed_by !== null && task.claimed_by !== session) {
      throw refuse(`${task.claimed_by} has it`, `status --release --task ${name}`);
    }
    task.claimed_by = session;
  });
  const json = { ok: true, task: name, claimed_by: session };
  return { json, text: `task ${name} is claimed by ${session}` };
}

/** The loop, but for one, that a task belongs to: not complete, and it names the task or is named by it. */
function findOwner(project: string, task: TaskState, except?: string): string | null {
  const owner = listLoops(project).find(({ name, state }) =>
    name !== except && state?.status !== "complete" &&
    (task.loop === name || state?.current_task === task.name)
  );
  return owner?.name ?? null;
}

/** Gives a task back; a loop keeps what it is at work on, and a halted one what it owns. */
async function runRelease(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "task");
  await updateTask(invocation.project, name, (task) => {
    const loop = findOwner(invocation.project, task);
    const view = loop === null ? null : viewLoop(invocation.project, loop);
    const isAtWork = view !== null && isLoopAtWork(view, name);
    if (isAtWork && task.claimed_by === null) {
      const isHalted = view.state?.status === "halted";
      throw new RefusedError(
        `Cannot release task "${name}": loop ${loop} has it${isHalted ? " and is halted" : ""}`,
        isHalted
          ? `status --approve --loop ${loop}`
          : `let the loop end its work, or status --remove-loop ${loop}`,
      );
    }
    task.claimed_by = null;
    if (!isAtWork) task.loop = null;
  });
  return { json: { ok: true, task: name, claimed_by: null }, text: `task ${name} is released` };
}

function isLoopAtWork({ state }: LoopView, task: string): boolean {
  return state === null || state.status === "halted" || state.current_task === task;
}

/** May a file, or the sources at large, be changed for a task or by a loop; the reason either way. */
function runCanEdit(invocation: Invocation): Answer {
  const { project } = invocation;
  const loopName = optionalText(invocation, "loop");
  const isInWorktree = invocation.given.has("loop-worktree");
  if (isInWorktree && loopName === null) {
    throw new UsageError('Cannot use "--loop-worktree" without "--loop"');
  }
  const loop = loopName === null ? null : readLoop(project, loopName);
  const root = isInWorktree ? loop?.state.worktree_path ?? null : project;
  const file = optionalText(invocation, "file");
  const place = root === null
    ? { kind: "denied", why: `loop ${loopName} has no worktree` } as const
    : file === null
    ? null
    : placeFile(project, root, file);
  const fromFile = place?.kind === "task" ? place.task : null;
  const name = optionalText(invocation, "task") ?? fromFile ?? loop?.state.current_task ?? null;
  const task = name === null ? null : readTask(project, name).task;
  const denial = denyEdit(task, place, loop);
  const reason = denial ?? `task ${name} is in ${task?.phase}`;
  return {
    json: { allowed: denial === null, reason, file, task: name },
    text: `${denial === null ? "allowed" : "denied"}: ${reason}`,
    ...(denial === null ? {} : { exitCode: 1, hint: `status --task ${name ?? "NAME"}` }),
  };
}

interface LoopFiles {
  readonly dir: string;
  readonly state: LoopState;
  readonly config: LoopConfig;
}

function readLoop(project: string, name: string): LoopFiles {
  const dir = findLoopDir(project, name);
  return { dir, state: readLoopState(dir), config: readLoopConfig(dir) };
}

function denyEdit(
  task: TaskState | null,
  place: FilePlace | null,
  loop: LoopFiles | null,
): string | null {
  if (place?.kind === "denied") return place.why;
  if (task === null) return "no task is named, so none is in a phase for edits";
  const { name, phase } = task;
  if (phase === "complete") return `task ${name} is complete`;
  if (place?.kind === "task") {
    return place.task === name ? null : `that file belongs to task ${place.task}`;
  }
  if (phase !== "implement") return `task ${name} is in ${phase}; sources change in implement`;
  if (loop === null) return null;
  if (loop.state.status === "halted") return `loop ${loop.state.name} is halted`;
  if (place === null || isInScope(place.path, loop.config.blast_radius?.file_scope)) return null;
  return `${place.path} is outside the file scope of loop ${loop.state.name}`;
}

type FilePlace =
  | { readonly kind: "source"; readonly path: string }
  | { readonly kind: "task"; readonly task: string }
  | { readonly kind: "denied"; readonly why: string };

/** Where a file really lies: a source below the root, a task's own file, or where nobody may write. */
function placeFile(project: string, root: string, file: string): FilePlace {
  const deny = (why: string): FilePlace => ({ kind: "denied", why });
  let [real, realRoot, realTasks] = [file, root, tasksDir(project)];
  try {
    real = resolveRealPath(resolve(root, file));
    [realRoot, realTasks] = [resolveRealPath(realRoot), resolveRealPath(realTasks)];
  } catch (error) {
    return deny((error as Error).message);
  }
  const inTasks = pathBelow(realTasks, real);
  if (inTasks !== null) {
    const [task = "", ...rest] = inTasks.replace(/^complete\//, "").split("/");
    const isOwnFile = NAME_PATTERN.test(task) && rest.length > 0 && !rest[0]!.startsWith(".");
    return isOwnFile ? { kind: "task", task } : deny(`${real} is changed by status alone`);
  }
  const path = pathBelow(realRoot, real);
  if (path === null || path === "") return deny(`${file} leads to ${real}, outside ${root}`);
  const parts = path.toLowerCase().split("/");
  if (parts[0] === ".automaton" || parts.includes(".git")) return deny(`${real} is no source`);
  return { kind: "source", path };
}

async function runScopeCheck(invocation: Invocation): Promise<Answer> {
  const { project } = invocation;
  const taskName = optionalText(invocation, "task");
  const task = taskName === null ? null : readTask(project, taskName).task;
  const loopName = optionalText(invocation, "loop") ?? task?.loop ?? null;
  if (task === null && loopName === null) {
    throw new UsageError('Cannot run "--scope-check": give --task or --loop');
  }
  const files = loopName === null
    ? await listUnexpectedSources(project, task?.phase === "implement" ? undefined : [])
    : await listOutsideLoop(project, readLoop(project, loopName));
  const ok = files.length === 0;
  return {
    json: { ok, task: taskName, loop: loopName, out_of_scope_files: files },
    text: ok
      ? "nothing is changed outside the scope"
      : files.map((path) => `out of scope: ${JSON.stringify(path)}`).join("\n"),
    ...(ok ? {} : { exitCode: 1, hint: "undo these changes, or widen the scope in loop.json" }),
  };
}

/** Uncommitted changes in the person's checkout outside a scope. */
async function listUnexpectedSources(
  project: string,
  scope: readonly string[] | undefined,
): Promise<string[]> {
  if (!(await isCheckout(project))) {
    throw new RefusedError(
      `Cannot check "${project}": it is no git checkout, so nothing tells what changed`,
      `git init "${project}"`,
    );
  }
  const isOurs = (path: string) => isInScope(path, [".automaton"]) || isInScope(path, scope);
  return (await listUncommitted(project)).filter((path) => !isOurs(path)).sort();
}

function listOutsideLoop(project: string, { state, config }: LoopFiles): Promise<string[]> {
  const { worktree, file_scope } = config.blast_radius ?? {};
  if (worktree === false) return listUnexpectedSources(project, file_scope);
  return listOutOfScope(project, state, config);
}

async function runCreateLoop(invocation: Invocation): Promise<Answer> {
  const { project, framework } = invocation;
  const name = checkName("loop", readText(invocation, "create-loop"));
  const template = checkName("template", readText(invocation, "from-template"));
  const templates = join(framework, "templates", "loops");
  const source = join(templates, template);
  if (!existsSync(join(source, "loop.json"))) {
    throw new RefusedError(
      `Cannot open template "${template}": there is none in ${templates}`,
      `templates there: ${listFolders(templates).join(", ") || "none"}`,
    );
  }
  const preset = optionalText(invocation, "harness");
  const instance = instantiateTemplate(join(source, "loop.json"), {
    name,
    schema: join(templates, "loop.schema.json"),
    hasWorktree: !invocation.given.has("no-worktree"),
  });
  const config = preset === null
    ? instance
    : applyPreset(instance, join(framework, "templates", "harnesses"), preset);
  const taskName = optionalText(invocation, "task");
  const refusal = taskName === null
    ? null
    : refuseClaim(project, name, readTask(project, taskName).task);
  if (refusal !== null) throw refusal;
  const dir = join(loopsDir(project), name);
  ensureDirSync(dir);
  const lock = await acquireLock(join(dir, ".state.lock"), DEFAULT_LOCK_TIMEOUT_S * 1000);
  try {
    if (lock === null || isLoopDir(dir)) {
      throw new RefusedError(
        `Cannot create loop "${name}": ${dir} exists`,
        `status --remove-loop ${name}`,
      );
    }
    copySync(source, dir, { overwrite: true });
    writeFileAtomic(join(dir, "loop.json"), `${JSON.stringify(config, null, 2)}\n`);
    saveLoopState(dir, makeLoopState(name));
    logEvent(dir, "INFO", "CREATED", { template, harness: preset });
    if (taskName !== null) await claimForLoop(invocation, { dir, task: taskName });
  } finally {
    lock?.close();
  }
  const json = { ok: true, loop: name, template, harness: preset, dir, task: taskName };
  const calls = preset === null ? "" : ` with harness ${preset}`;
  return { json, text: `created loop ${name} from template ${template}${calls}: ${dir}` };
}

/** A template's loop.json with the loop's own name; checked before anything is written. */
function instantiateTemplate(
  path: string,
  { name, schema, hasWorktree }: { name: string; schema: string; hasWorktree: boolean },
): LoopConfig {
  const { config, warnings } = parseLoopConfig(Deno.readTextFileSync(path), path);
  for (const warning of warnings) console.error(`warning: ${warning}`);
  const fields = { ...config, $schema: schema, name };
  if (hasWorktree) return fields;
  return { ...fields, blast_radius: { ...config.blast_radius, worktree: false } };
}

/** A file of templates/harnesses: how one agent is called. */
interface HarnessPreset {
  readonly notes?: readonly string[];
  readonly harness: NonNullable<LoopConfig["harness"]>;
  readonly roles?: Readonly<Partial<Record<RoleName, Pick<RoleConfig, "command" | "env">>>>;
}

// deno-fmt-ignore -- a table: one row a line.
const PRESET_RULES: readonly FieldRule[] = [
  ["notes", "a list of texts", isListOf(isText)],
  ["harness", "an object", isRecord, "required"],
  ["roles", "an object", isRecord],
  ["roles.*", "an object", isRecord],
];

/** A loop's configuration with a preset's agent in it; the template's time limits stay. */
function applyPreset(config: LoopConfig, folder: string, name: string): LoopConfig {
  const path = join(folder, `${checkName("harness preset", name)}.json`);
  const text = readTextIfPresent(path);
  if (text === null) {
    const names = listNames(folder).map((file) => /^([a-z0-9-]+)\.json$/.exec(file)?.[1])
      .filter((each) => each !== undefined).sort();
    throw new RefusedError(
      `Cannot open harness preset "${name}": there is none in ${folder}`,
      `presets there: ${names.join(", ") || "none"}`,
    );
  }
  const parsed = parseJsonText(text, path, parseJsonc);
  checkFields(parsed, PRESET_RULES, path);
  const preset = parsed as unknown as HarnessPreset;
  for (const note of preset.notes ?? []) console.error(`note: ${note}`);
  const limits = Object.entries(config.harness ?? {}).filter(([key]) => key.endsWith("_seconds"));
  const roles = (["implement", "verify", "orchestrate"] as const).map((role) => {
    const own = config.roles?.[role];
    if (role === "orchestrate" && !own) return [role, null];
    const { command: _, env: __, ...kept } = own ?? {};
    return [role, { ...kept, ...preset.roles?.[role] }];
  });
  const merged = {
    ...config,
    roles: Object.fromEntries(roles),
    harness: { ...Object.fromEntries(limits), ...preset.harness },
  };
  const checked = parseLoopConfig(JSON.stringify(merged), path);
  for (const warning of checked.warnings) console.error(`warning: ${warning}`);
  return checked.config;
}

async function runHaltLoop(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "halt-loop");
  const haltReason = checkWord("reason", readText(invocation, "reason"), HALT_REASONS);
  const detail = optionalLine(invocation, "detail") ?? `halted by ${describeActor()}`;
  return await withLoopLock(invocation, name, async (dir) => {
    const state = await loadLoopState(invocation, dir);
    if (state.status === "complete") {
      throw new RefusedError(
        `Cannot halt loop "${name}": it is complete, so it does not tick`,
        hintForStandstill(name, state),
      );
    }
    const wasHalted = state.status === "halted";
    await haltLoop(invocation, dir, { state, trip: { haltReason, detail } });
    const json = { ok: true, loop: name, status: state.status, halt_reason: state.halt_reason };
    const text = wasHalted
      ? `loop ${name} was halted before: ${state.halt_reason}`
      : `halted loop ${name}: ${haltReason}`;
    return { json, text };
  });
}

async function runRemoveLoop(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "remove-loop");
  const isPurged = invocation.given.has("purge");
  return await withLoopLock(invocation, name, async (dir) => {
    const worktrees = listFolders(dir).filter((entry) => entry.startsWith("worktree"));
    for (const entry of invocation.given.has("force") ? [] : worktrees) {
      const loss = await findLoss(join(dir, entry));
      if (loss === null) continue;
      throw new RefusedError(
        `Cannot remove "${join(dir, entry)}": it holds ${loss}`,
        "save them elsewhere, or add --force to lose them",
      );
    }
    await removeScheduleOf(name, dir, invocation.given.has("force"));
    for (const entry of worktrees) await removeWorktree(invocation.project, join(dir, entry));
    await releaseTasksOf(invocation.project, name, null);
    const logs = [...listLogs(dir).map((path) => basename(path)), ...listScheduleLogs(dir)];
    const kept = isPurged ? [] : [".state.lock", "outputs", ...logs];
    // loop.json goes last: as long as it is there, a removal that was cut short can be run again.
    const entries = listNames(dir).filter((entry) => ![...kept, "loop.json"].includes(entry));
    for (const entry of [...entries, "loop.json"]) removeIfPresent(join(dir, entry));
    if (isPurged) Deno.removeSync(dir, { recursive: true });
    const json = { ok: true, loop: name, kept: isPurged ? null : dir };
    return { json, text: `removed loop ${name}${isPurged ? "" : `; its logs stay in ${dir}`}` };
  }, isPurged ? findKeptDir : findLoopDir);
}

/** The folder of a loop, also of one that was removed and whose logs stayed. */
function findKeptDir(project: string, name: string): string {
  const dir = join(loopsDir(project), checkName("loop", name));
  return isDirectory(dir) ? dir : findLoopDir(project, name);
}

/** What would be lost with a worktree: files, or commits that are nowhere else; null for nothing. */
async function findLoss(worktree: string): Promise<string | null> {
  const isOwn = await isCheckout(worktree);
  const files = isOwn ? await listUncommitted(worktree) : listNames(worktree);
  if (files.length > 0) {
    return `${countWords(files.length, "uncommitted file")}, ${JSON.stringify(files[0])} first`;
  }
  if (!isOwn) return null;
  const onBranch = ["for-each-ref", "--count=1", "--contains=HEAD", "refs/heads"];
  if (!await readGitLine(worktree, onBranch)) return "commits that are on no branch";
  if (!existsSync(join(worktree, ".gitmodules"))) return null;
  const unpushed = "git rev-list --max-count=1 HEAD --not --remotes";
  const inSubmodules = ["submodule", "--quiet", "foreach", "--recursive", unpushed];
  const found = await readGit(worktree, inSubmodules);
  return found.length > 0 ? "commits in a submodule that were not pushed" : null;
}

/** Removes a worktree and its registration; its branch stays. */
async function removeWorktree(project: string, worktree: string): Promise<void> {
  if (!(await isCheckout(worktree))) return Deno.removeSync(worktree, { recursive: true });
  // What would be lost was looked at before; git itself refuses each worktree with submodules.
  await readGit(project, ["worktree", "remove", "--force", "--force", worktree]);
}

/** Gives back the tasks that a loop owns, but for the one it keeps. */
async function releaseTasksOf(project: string, loop: string, keep: string | null): Promise<void> {
  for (const name of listFolders(tasksDir(project))) {
    if (name === keep || !NAME_PATTERN.test(name)) continue;
    if (readTaskOrNull(project, name)?.loop !== loop) continue;
    await updateTask(project, name, (task) => {
      if (task.loop === loop) task.loop = null;
    });
  }
}

async function runPauseLoop(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "pause-loop");
  const dir = findLoopDir(invocation.project, name);
  const { state } = viewLoop(invocation.project, name);
  if (state?.status === "halted" || state?.status === "complete") {
    throw makePauseRefusal(name, state);
  }
  const isNow = invocation.given.has("now");
  const request = { at: new Date().toISOString(), by: describeActor(), now: isNow };
  writeFileAtomic(pauseRequestPath(dir), `${JSON.stringify(request)}\n`);
  const path = join(dir, ".state.lock");
  let lock = await acquireLock(path, 0);
  if (lock === null && await findTick(path) === null) {
    lock = await acquireLock(path, DEFAULT_LOCK_TIMEOUT_S * 1000);
  }
  if (lock === null) {
    const isInTick = await findTick(path) !== null;
    await switchSchedule(dir, "pause", false);
    const when = isNow ? "its harness is ended now" : "it stops before its next role";
    return {
      json: { ok: true, loop: name, status: "pausing" },
      text: isInTick
        ? `loop ${name} is in a tick: ${when}, and then it is paused`
        : `loop ${name} is held by another command: its next tick pauses it instead of working`,
    };
  }
  try {
    const state = await loadLoopState(invocation, dir);
    honourPauseRequest(dir, state);
    removeIfPresent(pauseRequestPath(dir));
    if (state.status !== "paused") throw makePauseRefusal(name, state);
    await switchSchedule(dir, "pause");
  } finally {
    lock.close();
  }
  const json = { ok: true, loop: name, status: "paused" };
  return { json, text: `paused loop ${name}`, hint: `status --resume-loop ${name}` };
}

function makePauseRefusal(name: string, state: LoopState): RefusedError {
  return new RefusedError(
    `Cannot pause loop "${name}": it is ${describeStatus(state)}, so it does not tick`,
    hintForStandstill(name, state),
  );
}

async function runResumeLoop(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "resume-loop");
  return await withLoopLock(invocation, name, async (dir) => {
    const state = await loadLoopState(invocation, dir);
    if (state.status === "halted" || state.status === "complete") {
      throw new RefusedError(
        `Cannot resume loop "${name}": it is ${describeStatus(state)}, not paused`,
        hintForStandstill(name, state),
      );
    }
    removeIfPresent(pauseRequestPath(dir));
    const wasPaused = state.status === "paused";
    if (wasPaused) {
      state.status = "running";
      saveLoopState(dir, state);
      logEvent(dir, "INFO", "RESUMED");
    }
    await switchSchedule(dir, "resume");
    return {
      json: { ok: true, loop: name, status: "running" },
      text: wasPaused ? `resumed loop ${name}` : `loop ${name} is running already`,
    };
  });
}

async function approveLoop(invocation: Invocation, name: string): Promise<Answer> {
  return await withLoopLock(invocation, name, async (dir) => {
    // A halt that this very command finds out about is not one that a person has looked at.
    const wasReadable = viewLoop(invocation.project, name).state !== null;
    const state = await loadLoopState(invocation, dir);
    if (state.status !== "halted" || !wasReadable) {
      const detail = wasReadable ? "" : "; its state was damaged";
      throw new RefusedError(
        `Cannot approve loop "${name}": it is ${describeStatus(state)} now${detail}`,
        hintForStandstill(name, state),
      );
    }
    const cleared = state.halt_reason;
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
    saveLoopState(dir, state);
    removeIfPresent(pauseRequestPath(dir));
    const { resumed_count, iteration_count } = state;
    logEvent(dir, "INFO", "APPROVED", { cleared, resumed_count, iteration_count });
    await switchSchedule(dir, "resume");
    const json = { ok: true, loop: name, status: "running", cleared, resumed_count };
    return { json, text: `approved loop ${name}: ${cleared} is cleared` };
  });
}

function runCanContinue(invocation: Invocation): Answer {
  const name = readText(invocation, "can-continue");
  const dir = findLoopDir(invocation.project, name);
  const state = countPauseRequest(dir, readLoopState(dir));
  const word = state.status === "running" ? "OK" : state.status.toUpperCase();
  const { halt_reason, iteration_count, resumed_count } = state;
  return {
    json: { state: word, loop: name, halt_reason, iteration_count, resumed_count },
    text: halt_reason === null ? word : `${word}: ${halt_reason}`,
    ...(word === "OK" ? {} : { hint: hintForStandstill(name, state) }),
  };
}

/** What the gate looks at; read once, under the loop's lock. */
interface GateSubject {
  readonly invocation: Invocation;
  readonly state: LoopState;
  readonly config: LoopConfig;
  readonly taskName: string | null;
  readonly task: TaskState | null;
  /** Non-local dollars spent; null where the harness reports none. */
  readonly spentUsd: number | null;
  readonly remainingIterations: number;
  /** Filled by the drift check. */
  readonly outOfScope: string[];
}

type GateCheck = (subject: GateSubject) => GateTrip | null | Promise<GateTrip | null>;

/** The checks after the status, in the order in which they answer. */
const GATE_CHECKS: readonly GateCheck[] = [
  checkIterations,
  checkBudget,
  checkTaskPhase,
  checkDrift,
  checkPlateau,
  checkModels,
];

async function runCheckGate(invocation: Invocation): Promise<Answer> {
  const name = readText(invocation, "check-gate");
  const isDryRun = invocation.given.has("dry-run");
  if (isDryRun) return await checkGate(invocation, findLoopDir(invocation.project, name), isDryRun);
  return await withLoopLock(invocation, name, (dir) => checkGate(invocation, dir, isDryRun));
}

/** Applies the brakes; one that trips halts the loop (a dry run changes nothing). */
async function checkGate(invocation: Invocation, dir: string, isDryRun: boolean): Promise<Answer> {
  const { project } = invocation;
  const state = isDryRun ? readLoopState(dir) : await loadLoopState(invocation, dir);
  if (!isDryRun) honourPauseRequest(dir, state);
  if (!isDryRun && state.status !== "running") await switchSchedule(dir, "pause");
  const config = readLoopConfig(dir);
  if (!isDryRun) settleKilledTick(project, { dir, state, config });
  const asked = optionalText(invocation, "task");
  const askedTask = asked === null ? null : readTask(project, asked).task;
  const taskName = asked ?? state.current_task;
  if (taskName !== null && !isDryRun) await restoreTask(project, taskName, dir);
  const allowed = config.brakes?.max_iterations ?? LOOP_DEFAULTS.maxIterations;
  const subject: GateSubject = {
    invocation,
    state,
    config,
    taskName,
    task: askedTask ?? (taskName === null ? null : readTaskOrNull(project, taskName)),
    spentUsd: readSpentUsd(dir, config.brakes?.max_budget_usd ?? null),
    remainingIterations: allowed - (state.iteration_count - (state.iteration_base ?? 0)),
    outOfScope: [],
  };
  const trip = state.status === "running" ? await findTrip(subject) : null;
  if (trip !== null && isDryRun) {
    Object.assign(state, { status: "halted", halt_reason: trip.haltReason });
  } else if (trip !== null) await haltLoop(subject.invocation, dir, { state, trip });
  return answerGate(basename(dir), subject, trip);
}

/** Puts a task's damaged state right from its copy; where that fails the gate stops at the task. */
async function restoreTask(project: string, name: string, dir: string): Promise<void> {
  if (readTaskOrNull(project, name) !== null || findTaskDir(project, name) === null) return;
  try {
    const { dir: taskDir, lock } = await lockTask(project, name);
    using _ = lock;
    const { problem } = loadState(join(taskDir, ".state"), parseTaskState);
    if (problem !== null) logEvent(dir, "ERROR", "STATE_RESTORED", { message: problem });
  } catch (error) {
    console.error(`warning: ${(error as Error).message}`);
  }
}

/**
 * Lets go of the current task where a tick of this loop brought it to its end and was killed before its
 * save. A task that somebody else has moved there is one to stop at.
 */
function settleKilledTick(project: string, { dir, state, config }: LoopFiles): void {
  if (state.status !== "running" || state.current_task === null) return;
  const task = readTaskOrNull(project, state.current_task);
  if (task?.phase !== "complete" && task?.phase !== WAITING_PHASE) return;
  if (task.history.at(-1)?.by.split("/")[0] !== `loop:${basename(dir)}`) return;
  const kind = config.work_source?.kind ?? "single";
  state.current_task = null;
  if (task.phase === "complete" && !["audit", "backlog"].includes(kind)) state.status = "complete";
  saveLoopState(dir, state);
  logEvent(dir, "WARNING", "TASK_RELEASED", { task: task.name, phase: task.phase });
}

async function findTrip(subject: GateSubject): Promise<GateTrip | null> {
  for (const check of GATE_CHECKS) {
    const trip = await check(subject);
    if (trip !== null) return trip;
  }
  return null;
}

function answerGate(name: string, subject: GateSubject, trip: GateTrip | null): Answer {
  const { invocation, state, config, task, spentUsd } = subject;
  const budget = config.brakes?.max_budget_usd ?? null;
  const waitMs = Date.parse(state.not_before ?? "") - Date.now();
  const longestMs = (config.harness?.backoff?.seconds ?? LOOP_DEFAULTS.backoffSeconds) * 1000;
  // A longer wait than a tick sets comes from a clock that was wrong then, or is now.
  const isBackoff = state.status === "running" && waitMs > 0 && waitMs <= longestMs;
  const reason = state.status === "halted"
    ? `halted:${state.halt_reason}`
    : state.status !== "running"
    ? state.status
    : isBackoff
    ? "backoff"
    : "ok";
  const remaining = Math.max(0, subject.remainingIterations);
  const json = {
    ok: reason === "ok",
    reason,
    halt_reason: state.halt_reason,
    remaining_iterations: remaining,
    remaining_budget_usd: budget === null ? null : Math.max(0, budget - (spentUsd ?? 0)),
    task_phase: task?.phase ?? null,
    task_in_halt_loop: task !== null && findHaltedOwner(invocation.project, task) !== null,
    out_of_scope_files: subject.outOfScope,
  };
  if (json.ok) return { json, text: `ok: ${countWords(remaining, "iteration")} left` };
  const text = `not ok: ${reason}${trip === null ? "" : ` (${trip.detail})`}`;
  const hint = isBackoff
    ? `wait until ${state.not_before}, when the loop goes on`
    : hintForStandstill(name, state);
  return { json, text, hint };
}

function checkIterations({ state, remainingIterations }: GateSubject): GateTrip | null {
  if (remainingIterations > 0) return null;
  const used = state.iteration_count - (state.iteration_base ?? 0);
  return { haltReason: "iterations_exhausted", detail: `${countWords(used, "iteration")} used` };
}

function checkBudget({ config, spentUsd }: GateSubject): GateTrip | null {
  const allowed = config.brakes?.max_budget_usd ?? null;
  if (allowed === null || spentUsd === null || spentUsd < allowed) return null;
  return { haltReason: "budget_exhausted", detail: `${spentUsd} of ${allowed} USD spent` };
}

function checkTaskPhase({ config, taskName, task }: GateSubject): GateTrip | null {
  if (taskName === null) return null;
  const allowed = config.allowed_phases ?? LOOP_DEFAULTS.allowedPhases;
  if (task !== null && allowed.includes(task.phase)) return null;
  const problem = task === null
    ? "cannot be read"
    : `is in ${task.phase}, where this loop may not work`;
  return { haltReason: "human_intervention", detail: `task ${taskName} ${problem}` };
}

async function checkDrift(subject: GateSubject): Promise<GateTrip | null> {
  const { invocation, state, config, outOfScope } = subject;
  outOfScope.push(...await listOutOfScope(invocation.project, state, config));
  if (outOfScope.length === 0) return null;
  const listed = outOfScope.slice(0, 5).map((path) => JSON.stringify(path)).join(", ");
  const more = outOfScope.length > 5 ? ` and ${outOfScope.length - 5} more` : "";
  const detail = `changed outside the file scope: ${listed}${more}`;
  return { haltReason: "drift_detected", detail };
}

function checkPlateau({ state, config }: GateSubject): GateTrip | null {
  const window = config.brakes?.score_plateau_window ?? LOOP_DEFAULTS.plateauWindow;
  if (!isPlateau(state.score_history, state.pass_history ?? [], window)) return null;
  const scores = state.score_history.slice(-window).join(", ");
  const detail = `no progress in ${window} ticks: scores ${scores}`;
  return { haltReason: "verifier_failed", detail };
}

function checkModels({ invocation, config }: GateSubject): GateTrip | null {
  const file = readModels(invocation.project, invocation.framework);
  if (file === null || Object.keys(file.models).length < 2) return null;
  const modelOf = (role: RoleName) => config.roles?.[role]?.model ?? file.default ?? "no model";
  const [implement, verify] = [modelOf("implement"), modelOf("verify")];
  const isSame = implement === verify ||
    file.conflicts?.some((pair) => pair.includes(implement) && pair.includes(verify));
  if (!isSame) return null;
  const detail = `implement (${implement}) and verify (${verify}) count as the same model`;
  return { haltReason: "human_intervention", detail };
}

async function runClaimLoopTask(invocation: Invocation): Promise<Answer> {
  const [name, task] = [readText(invocation, "claim-loop-task"), readText(invocation, "task")];
  return await withLoopLock(invocation, name, async (dir) => {
    if (readLoopState(dir).status === "halted") {
      // Its task would be anybody's, which nothing but an approval may bring about.
      throw new RefusedError(
        `Cannot give loop "${name}" task ${task}: it is halted`,
        `status --approve --loop ${name}`,
      );
    }
    await claimForLoop(invocation, { dir, task });
    return { json: { ok: true, loop: name, task }, text: `task ${task} belongs to loop ${name}` };
  });
}

/** Makes a loop the owner of a task, unless another loop or somebody's session has it. */
async function claimForLoop(
  place: ProjectPlace,
  { dir, task: name }: { dir: string; task: string },
): Promise<void> {
  const loop = basename(dir);
  await updateTask(place.project, name, (task) => {
    const refusal = refuseClaim(place.project, loop, task);
    if (refusal !== null) throw refusal;
    task.loop = loop;
  });
  // Within a tick the runner saves the current task itself, in the tick's one save.
  if (readEnv("AUTOMATON_NO_LOOP_LOCK") !== "1") {
    saveLoopState(dir, { ...await loadLoopState(place, dir), current_task: name });
  }
  await releaseTasksOf(place.project, loop, name);
}

/** Why a loop may not have a task, or null when it may. */
function refuseClaim(project: string, loop: string, task: TaskState): RefusedError | null {
  const refuse = (why: string, hint: string) =>
    new RefusedError(`Cannot claim task "${task.name}" for loop "${loop}": ${why}`, hint);
  const show = `status --task ${task.name}`;
  if (task.phase === "complete") return refuse("it is complete", show);
  if (task.phase === WAITING_PHASE) {
    return refuse("it waits for a person", `status --approve --task ${task.name}`);
  }
  const owner = findOwner(project, task, loop);
  if (owner !== null) return refuse(`loop ${owner} has it`, "status --loop-list");
  if (task.claimed_by === null) return null;
  return refuse(`${task.claimed_by} has it`, `status --release --task ${task.name}`);
}

function runLoopList(invocation: Invocation): Answer {
  const loops = listLoops(invocation.project).map((view) =>
    viewSchedule(
      view.state === null ? view : { ...view, state: countPauseRequest(view.dir, view.state) },
    )
  );
  for (const { problem } of loops) if (problem !== null) console.error(`warning: ${problem}`);
  const json = { loops: loops.map(describeLoop) };
  if (loops.length === 0) {
    return { json, text: "no loops", hint: "status --create-loop NAME --from-template TEMPLATE" };
  }
  const rows = loops.map(({ view, record, problem }) => {
    const { name, state } = view;
    if (state === null) return [name, "broken", "-", "-", "-", "-", view.problem];
    const scores = state.score_history.map((score) => score.toFixed(2)).join(" ");
    const wake = lastWake(view);
    return [
      name,
      describeStatus(state),
      `${state.iteration_count}`,
      scores || "-",
      state.current_task ?? "-",
      problem !== null ? "broken" : record === null ? "-" : describeSchedule(record),
      wake === null ? "never" : describeAge(Date.now() - wake),
    ];
  });
  const header = ["LOOP", "STATUS", "TICKS", "SCORES", "TASK", "SCHEDULE", "LAST WAKE"];
  return { json, text: renderColumns([header, ...rows]) };
}

/** What the audit says about each loop. */
function summarizeLoop(
  { view: { name, state }, record }: ScheduledLoop,
): Record<string, unknown> {
  return {
    name,
    status: state?.status ?? null,
    halt_reason: state?.halt_reason ?? null,
    iteration_count: state?.iteration_count ?? null,
    last_tick_at: state?.last_tick_at ?? null,
    schedule: summarizeSchedule(record),
  };
}

function describeLoop(loop: ScheduledLoop): Record<string, unknown> {
  const { view } = loop;
  const wake = lastWake(view);
  return {
    ...summarizeLoop(loop),
    current_task: view.state?.current_task ?? null,
    resumed_count: view.state?.resumed_count ?? null,
    score_history: view.state?.score_history ?? [],
    last_wake_at: wake === null ? null : new Date(wake).toISOString(),
    problem: view.state === null ? view.problem : null,
  };
}

async function runLoopLog(invocation: Invocation): Promise<Answer> {
  const dir = findLoopDir(invocation.project, readText(invocation, "loop-log"));
  const bounds = { min: 1, max: 1_000_000 };
  const count = readWholeNumber(invocation.given, "lines", bounds) ?? DEFAULT_LOG_LINES;
  if (invocation.given.has("follow")) {
    try {
      await followLog(dir, count, invocation.given.has("json"));
    } catch (error) {
      if (!(error instanceof Deno.errors.BrokenPipe)) throw error;
      return { json: {}, text: "" }; // Nobody reads any more.
    }
  }
  const lines = readLastLines(listLogs(dir), count);
  const text = lines.length === 0 ? "the log is empty" : lines.map(renderLogLine).join("\n");
  return { json: { lines: lines.map(parseLogLine) }, text };
}

/** The last lines of a log that was rotated; files come newest first. */
function readLastLines(paths: readonly string[], count: number): string[] {
  let lines: string[] = [];
  for (const path of paths) {
    if (lines.length >= count) break;
    const older = (readTextIfPresent(path) ?? "").split("\n").filter((line) => line !== "");
    lines = [...older.slice(-(count - lines.length)), ...lines];
  }
  return lines;
}

/** A log line as an object; one that is torn as the text it is. */
function parseLogLine(line: string): unknown {
  try {
    return JSON.parse(line);
  } catch {
    return line; // A crash may have cut it short.
  }
}

/** A log line for people: time, event, and what goes with it. */
function renderLogLine(line: string): string {
  const entry = parseLogLine(line);
  if (!isRecord(entry)) return JSON.stringify(line);
  const { at, level, event, ...fields } = entry;
  const details = Object.entries(fields).map(([key, value]) => `${key}=${JSON.stringify(value)}`);
  const mark = level === "INFO" ? "" : ` ${level}`;
  return [`${at}${mark} ${event}`, ...details].join(" ");
}

/** Prints the last lines of a log and what is appended to it, also across its rotation. */
async function followLog(dir: string, count: number, isJson: boolean): Promise<never> {
  const path = join(dir, ".state.log");
  // Not by console.log(), which does not tell when the reader has gone.
  const print = (lines: readonly string[]) => {
    const text = lines.map((line) => `${isJson ? line : renderLogLine(line)}\n`).join("");
    const bytes = new TextEncoder().encode(text);
    for (let done = 0; done < bytes.length;) done += Deno.stdout.writeSync(bytes.subarray(done));
  };
  while (!existsSync(path)) await sleep(FOLLOW_INTERVAL_MS);
  let file = openLog(path);
  let readNew = makeLineReader(file);
  const older = readLastLines(listLogs(dir).filter((each) => each !== path), count);
  print([...older, ...readNew()].slice(-count));
  while (true) {
    await sleep(FOLLOW_INTERVAL_MS);
    print(readNew());
    if (isSameFile(file, path) || !existsSync(path)) continue;
    print(readNew()); // What was written between the last look and the rotation.
    file.close();
    file = openLog(path);
    readNew = makeLineReader(file);
  }
}

/** Opens a log to read; a pipe in its place would be waited for without end. */
function openLog(path: string): Deno.FsFile {
  if (Deno.statSync(path).isFile) return Deno.openSync(path);
  throw new TypeError(`Cannot read "${path}": it is no regular file`);
}

/** @returns A function that reads the whole lines that were added since it was called last. */
function makeLineReader(file: Deno.FsFile): () => string[] {
  const [buffer, decoder] = [new Uint8Array(65_536), new TextDecoder()];
  let rest = "";
  return () => {
    for (let size = file.readSync(buffer); size !== null; size = file.readSync(buffer)) {
      rest += decoder.decode(buffer.subarray(0, size), { stream: true });
    }
    const lines = rest.split("\n");
    rest = lines.pop()!;
    return lines.filter((line) => line !== "");
  };
}

/** A finding before it is sorted, and what it is about. */
interface Finding {
  readonly category: Violation["category"];
  readonly message: string;
  readonly task?: string;
  readonly loop?: string;
}

const CATEGORIES: Readonly<
  Record<Violation["category"], { title: string; severity: Violation["severity"] }>
> = {
  1: { title: "State", severity: "high" },
  2: { title: "Documents", severity: "high" },
  3: { title: "Stalled", severity: "med" },
  4: { title: "Ownership and scope", severity: "high" },
  5: { title: "Unfinished business", severity: "med" },
  6: { title: "Housekeeping", severity: "low" },
};

async function runAudit(invocation: Invocation): Promise<Answer> {
  const { project, given } = invocation;
  const days = readWholeNumber(given, "stalled-days", { min: 1, max: 3650 }) ??
    DEFAULT_STALLED_DAYS;
  const tasks = auditTasks(project, days);
  const loops = listLoops(project);
  const findings = [...tasks.findings, ...auditOwnership(project, loops)];
  const schedules = loops.map(viewSchedule);
  for (const loop of schedules) findings.push(...await auditLoop(project, loop));
  const violations = findings.map(({ category, message, task, loop }): Violation => ({
    category,
    severity: CATEGORIES[category].severity,
    task: task ?? null,
    loop: loop ?? null,
    message,
    resolved: false,
  })).sort(compareViolations);
  const { total, untracked } = tasks;
  const json = {
    violations,
    loops: schedules.map(summarizeLoop),
    total_tasks: total,
    untracked_tasks: untracked,
  };
  const counts = `${countWords(total, "task")} (${untracked} untracked), ${
    countWords(loops.length, "loop")
  }`;
  const text = [counts, ...renderViolations(violations), ...renderLoops(loops)].join("\n");
  if (violations.length === 0) return { json, text };
  return { json, text, hint: "status --task NAME shows a task, status --loop-log NAME a loop" };
}

/** Sorts by severity, category, task, and then by message so that the order is always the same. */
function compareViolations(a: Violation, b: Violation): number {
  const severities = ["high", "med", "low"];
  const bySeverity = severities.indexOf(a.severity) - severities.indexOf(b.severity);
  if (bySeverity !== 0) return bySeverity;
  if (a.category !== b.category) return a.category - b.category;
  return compareTexts(a.task ?? "", b.task ?? "") || compareTexts(a.message, b.message);
}

/** By code unit: the same order everywhere, and quick. */
function compareTexts(a: string, b: string): number {
  return a < b ? -1 : a > b ? 1 : 0;
}

function renderViolations(violations: readonly Violation[]): string[] {
  return Object.entries(CATEGORIES).flatMap(([category, { title }]) => {
    const own = violations.filter((violation) => violation.category === Number(category));
    const found = own.map(({ severity, message }) => `  ${severity.padEnd(4)}  ${message}`);
    return ["", `${category} ${title}: ${own.length || "nothing found"}`, ...found];
  });
}

function renderLoops(loops: readonly LoopView[]): string[] {
  const lines = loops.map((view) =>
    `  ${view.name}: ${view.state === null ? view.problem : describeStatus(view.state)}`
  );
  return lines.length === 0 ? [] : ["", "Loops:", ...lines];
}

/** All tasks: what is wrong with them, and how many there are. */
function auditTasks(
  project: string,
  stalledDays: number,
): { findings: Finding[]; total: number; untracked: number } {
  const findings: Finding[] = [];
  let [total, untracked] = [0, 0];
  for (const parent of [tasksDir(project), join(tasksDir(project), "complete")]) {
    const isFinished = basename(parent) === "complete";
    for (const name of listFolders(parent)) {
      // Hidden: a task in the making. "complete" among the open ones: the folder of the others.
      if (name.startsWith(".") || (name === "complete" && !isFinished)) continue;
      const dir = join(parent, name);
      const own = auditTask(dir, isFinished, stalledDays);
      // Moved to the other folder since it was listed: what is missing here is there.
      if (own?.length !== 0 && !isDirectory(dir)) continue;
      total++;
      if (own === null) {
        untracked++;
        const message = `task ${name} has no .state (untracked)`;
        findings.push({ category: 1, task: name, message });
      }
      for (const finding of own ?? []) findings.push({ ...finding, task: name });
    }
  }
  return { findings, total, untracked };
}

/** Findings about one task's folder; null for an untracked one. */
function auditTask(dir: string, isFinished: boolean, stalledDays: number): Finding[] | null {
  const name = basename(dir);
  let task: TaskState;
  try {
    const text = readTextIfPresent(join(dir, ".state"));
    if (text === null) return null;
    task = parseTaskState(text, join(dir, ".state"));
  } catch (error) {
    return [{ category: 1, message: (error as Error).message }];
  }
  const isComplete = task.phase === "complete";
  const findings: Finding[] = [];
  const add = (category: Violation["category"], problem: string) => {
    findings.push({ category, message: `task ${name} ${problem}` });
  };
  if (task.name !== name) add(1, `calls itself ${task.name} in its .state`);
  if (!isKnownPhase(task.phase)) add(1, `is in the unknown phase "${task.phase}"`);
  else {
    const impossible = findImpossibleHistory(task);
    if (impossible !== null) add(1, `has an impossible history: ${impossible}`);
  }
  for (const phase of listPhasesBehind(task)) {
    const document = PHASE_DOCUMENTS[phase]!;
    if (!isDocumentWritten(join(dir, document))) add(2, `has left ${phase} without ${document}`);
  }
  const isInWork = task.approved_at !== null || task.loop !== null || task.claimed_by !== null;
  const idleMs = Date.now() - Date.parse(task.updated_at);
  if (isInWork && !isComplete && task.phase !== WAITING_PHASE && idleMs > stalledDays * DAY_MS) {
    add(3, `has not moved for more than ${countWords(stalledDays, "day")}`);
  }
  if (isComplete) {
    for (const document of ["SPEC.md", "BUG_REPORT.md"]) {
      if (!isDocumentWritten(join(dir, document))) continue;
      const open = countOpenItems(join(dir, document));
      if (open > 0) add(5, `is complete with ${countWords(open, "unchecked item")} in ${document}`);
    }
  }
  if (isComplete && !isFinished) add(5, "is complete but not moved to tasks/complete/");
  if (!isComplete && isFinished) add(5, "lies in tasks/complete/ unfinished");
  return findings;
}

/** Unchecked items of a Markdown list. */
function countOpenItems(path: string): number {
  return readTextIfPresent(path)?.match(/^[ \t]*[-*+] \[ \]/gm)?.length ?? 0;
}

/** Who owns which task, as the loops have it. */
function auditOwnership(project: string, loops: readonly LoopView[]): Finding[] {
  const owners = new Map<string, Set<string>>();
  const findings: Finding[] = [];
  for (const { name, dir, state } of loops) {
    const current = state?.current_task ?? null;
    if (current === null || state?.status === "complete") continue;
    const claimants = owners.get(current) ?? new Set();
    owners.set(current, claimants.add(name));
    const task = readTaskOrNull(project, current);
    if (task === null) continue;
    if (loops.some((other) => other.name === task.loop)) claimants.add(task.loop!);
    const allowed = readConfigOrNull(dir)?.allowed_phases ?? LOOP_DEFAULTS.allowedPhases;
    if (allowed.includes(task.phase)) continue;
    const message = `loop ${name} has task ${current} in ${task.phase}, where it may not work`;
    findings.push({ category: 4, task: current, loop: name, message });
  }
  for (const [task, claimants] of owners) {
    if (claimants.size < 2) continue;
    const names = [...claimants].sort().join(", ");
    const message = `task ${task} is claimed by ${claimants.size} loops: ${names}`;
    findings.push({ category: 4, task, message });
  }
  return findings;
}

function readConfigOrNull(dir: string): LoopConfig | null {
  try {
    return readLoopConfig(dir);
  } catch {
    return null; // An invalid loop.json is a finding of its own (category 6).
  }
}

/** Findings about one loop: its state, its files, its scope. Messages are the same until it changes. */
async function auditLoop(
  project: string,
  { view, record, problem }: ScheduledLoop,
): Promise<Finding[]> {
  const { name, dir, state } = view;
  const findings: Finding[] = [];
  const add = (category: Violation["category"], problem: string) => {
    findings.push({ category, loop: name, message: `loop ${name} ${problem}` });
  };
  if (state === null) add(1, `has a broken state: ${view.problem}`);
  if (problem !== null) add(6, `has a broken schedule: ${problem}`);
  if (record?.replaces !== undefined) {
    add(6, `has its schedule before in ${record.replaces.scheduler} yet`);
  }
  const lost = await findLostSchedule(record, dir);
  if (lost !== null) add(6, `has no schedule: ${lost}`);
  try {
    const config = readLoopConfig(dir);
    if (state?.status === "running" && isOverdue(view, config, record)) {
      add(6, "has not ticked for more than three intervals");
    }
    const outside = state === null ? [] : await listOutOfScope(project, state, config);
    for (const path of outside) add(4, `changed ${JSON.stringify(path)} outside its file scope`);
  } catch (error) {
    add(6, `cannot be checked: ${(error as Error).message}`);
  }
  const isDone = state === null || state.status === "complete";
  for (const folder of listFolders(dir)) {
    const isLeftover = folder.startsWith("worktree.") || (isDone && folder === "worktree");
    if (isLeftover) add(6, `leaves the folder ${join(dir, folder)} behind`);
  }
  for (const path of listLogs(dir)) {
    if (measureFile(path) > LOG_LIMIT_BYTES) add(6, `has ${basename(path)} over its cap`);
  }
  return findings;
}

/** A file's size in bytes; 0 where it is gone since it was listed. */
function measureFile(path: string): number {
  try {
    return Deno.statSync(path).size;
  } catch {
    return 0; // A rotation has moved it on.
  }
}

function isOverdue(
  view: LoopView,
  { schedule }: LoopConfig,
  record: ScheduleRecord | null,
): boolean {
  const intervalMs = 1000 * (record?.interval_seconds ??
    schedule?.interval_seconds ?? LOOP_DEFAULTS.intervalSeconds);
  const wake = lastWake(view);
  return wake !== null && Date.now() - wake > 3 * intervalMs;
}

// --- Doctor ---

/** One line of the doctor's report. */
export interface DoctorCheck {
  readonly name: string;
  readonly status: "ok" | "warning" | "failure";
  readonly message: string;
  /** What to do about it; null where all is well. */
  readonly hint: string | null;
}

const MIN_DENO = "2.6.0";
const LOW_DISK_MIB = 1024;
const FULL_DISK_MIB = 100;
/** Two clocks (this machine's and a file server's) may differ by this much without harm. */
const CLOCK_SLACK_MS = 5000;

const healthy = (name: string, message: string): DoctorCheck => ({
  name,
  status: "ok",
  message,
  hint: null,
});

/** A loop that is scheduled and running would fail: worse than one that nobody has started. */
const complaint = (
  name: string,
  isFailure: boolean,
  message: string,
  hint: string,
): DoctorCheck => ({ name, status: isFailure ? "failure" : "warning", message, hint });

/** Compares versions of the form 1.2.3. */
function isOlder(version: string, minimum: string): boolean {
  const [found, wanted] = [version, minimum].map((text) => text.split(".").map(Number));
  for (let index = 0; index < 3; index++) {
    const difference = (found![index] ?? 0) - (wanted![index] ?? 0);
    if (difference !== 0) return difference < 0;
  }
  return false;
}

function checkDeno(framework: string): DoctorCheck {
  const version = Deno.version.deno;
  const source = readTextIfPresent(join(framework, "vendor", ".source"))?.split(":")[0];
  const std = source === "jsr.io"
    ? "@std from jsr.io"
    : source === "lib/std"
    ? "@std stand-ins of lib/std"
    : "@std from Deno's cache";
  const where = Deno.build.standalone ? "built into the programs" : Deno.execPath();
  const message = `${version} (${where}), ${std}`;
  if (!isOlder(version, MIN_DENO)) return healthy("deno", message);
  return complaint("deno", true, `${message}; older than ${MIN_DENO}`, "./install.sh");
}

async function checkGitVersion(host: SchedulerHost): Promise<DoctorCheck> {
  const argv = ["git", "--version"];
  const outcome = await host.run(argv);
  const words = new TextDecoder().decode(outcome.stdout).trim();
  if (outcome.code === 0) return healthy("git", words.replace(/^git version /, ""));
  const message = `${explainOutcome(argv, outcome)}; loops would work in the project itself`;
  return complaint("git", false, message, "install git (Debian: apt-get install git)");
}

/** How a program is installed, told from its first bytes. */
function readProgramForm(path: string): "compiled" | "launcher" {
  const file = Deno.openSync(path, { read: true });
  try {
    const head = new Uint8Array(2);
    file.readSync(head);
    return bytesToText(head) === "#!" ? "launcher" : "compiled";
  } finally {
    file.close();
  }
}

/** Starts a program and compares its version with the checkout's. */
async function checkProgram(
  framework: string,
  name: "loop-runner" | "status" | "vram-detect",
  host: SchedulerHost,
): Promise<DoctorCheck> {
  const argv = findProgram(framework, name);
  const path = argv.length === 1 ? argv[0]! : argv.at(-1)!;
  const label = `program ${name}`;
  let form = "source";
  try {
    if (argv.length === 1) form = readProgramForm(path);
  } catch (error) {
    return complaint(label, true, `${path}: ${(error as Error).message}`, "./install.sh");
  }
  const outcome = await host.run([...argv, "--version"]);
  const answer = new TextDecoder().decode(outcome.stdout).trim();
  const wanted = `${name} ${readVersion(framework)}`;
  if (outcome.code === 0 && answer === wanted) {
    return healthy(label, `${answer.slice(name.length + 1)}, ${form} (${path})`);
  }
  const found = outcome.code === 0
    ? `it says "${answer}", the checkout "${wanted}"`
    : explainOutcome([path, "--version"], outcome);
  return complaint(label, true, `${form} (${path}): ${found}`, "./install.sh");
}

/** A loop with its schedule, as the doctor looks at both. */
interface LoopToCheck extends ScheduledLoop {
  /** Whether it is meant to tick by itself: then what is missing is a failure. */
  readonly isLive: boolean;
}

/** Each scheduler that loops use, else the one that would be used: is it there, does it run. */
async function checkSchedulers(
  loops: readonly LoopToCheck[],
  host: SchedulerHost,
): Promise<DoctorCheck[]> {
  const used = new Set(loops.flatMap(({ record }) => record === null ? [] : [record.scheduler]));
  if (used.size === 0) {
    try {
      used.add((await chooseScheduler(host)).scheduler);
    } catch (error) {
      const { message, hint } = error as RefusedError;
      return [complaint("scheduler", false, message, hint)];
    }
  }
  const checks: DoctorCheck[] = [];
  for (const scheduler of used) {
    const isFailure = loops.some((loop) => loop.isLive && loop.record?.scheduler === scheduler);
    checks.push(...await checkScheduler(scheduler, host, isFailure));
  }
  return checks;
}

async function checkScheduler(
  scheduler: Scheduler,
  host: SchedulerHost,
  isFailure: boolean,
): Promise<DoctorCheck[]> {
  if (scheduler === "cron") return [await checkCron(host, isFailure)];
  if (scheduler === "systemd") return await checkSystemd(host, isFailure);
  const argv = scheduler === "launchd"
    ? ["launchctl", "print", await findLaunchdDomain(host)]
    : ["schtasks", "/query"];
  const outcome = await host.run(argv);
  if (outcome.code === 0) return [healthy("scheduler", scheduler)];
  const message = `${scheduler}: ${explainOutcome(argv, outcome)}`;
  return [complaint("scheduler", isFailure, message, "log in to a session of your own and retry")];
}

async function checkCron(host: SchedulerHost, isFailure: boolean): Promise<DoctorCheck> {
  try {
    await readCrontab(host);
  } catch (error) {
    const { message, hint } = error as RefusedError;
    return complaint("scheduler", isFailure, `cron: ${message}`, hint);
  }
  const isRunning = await isCronRunning(host);
  if (isRunning) return healthy("scheduler", "cron, and its daemon runs");
  const message = isRunning === null
    ? "cron, but whether its daemon runs cannot be told here"
    : "cron, but no cron process runs: nothing will fire";
  const hint = "start it (systemd: systemctl enable --now cron; container: cron)";
  return complaint("scheduler", isFailure && isRunning === false, message, hint);
}

async function checkSystemd(host: SchedulerHost, isFailure: boolean): Promise<DoctorCheck[]> {
  const { problem } = await askSystemd(host);
  if (problem !== null) {
    const hint = "log in as this person (not by su or sudo), or use --scheduler cron";
    return [complaint("scheduler", isFailure, `systemd: ${problem}`, hint)];
  }
  const isOn = await isLingering(host);
  const linger = isOn ? healthy("lingering", "on: timers go on after logout") : complaint(
    "lingering",
    false,
    isOn === null ? "cannot be told" : "off: timers stop at logout",
    "loginctl enable-linger",
  );
  return [healthy("scheduler", "systemd, and the session answers"), linger];
}

/** One loop: its state, its schedule, and the agents on the PATH that the schedule has. */
async function checkLoop(
  { framework, project }: Invocation,
  { view, record, problem, isLive }: LoopToCheck,
): Promise<DoctorCheck[]> {
  const { name, dir, state } = view;
  const label = `loop ${name}`;
  if (state === null) return [complaint(label, true, view.problem, "status --audit")];
  if (problem !== null) return [complaint(label, true, problem, hintForRecord(dir))];
  const checks = [await checkSchedule(view, record, isLive)];
  let config: LoopConfig;
  try {
    config = readLoopConfig(dir);
  } catch (error) {
    return [...checks, complaint(label, true, (error as Error).message, "correct loop.json")];
  }
  const path = record?.path ?? readEnv("PATH") ?? "";
  const where = record === null ? "PATH" : "the PATH of its schedule";
  for (const [agent, found] of resolveAgents({ framework, project }, { dir, config, path })) {
    if (found !== null) checks.push(healthy(label, `agent ${found}`));
    else {
      const hint = record === null
        ? "install it, or name another in loop.json"
        : `install it, then status --install-schedule ${name} takes over the new PATH`;
      checks.push(complaint(label, isLive, `agent "${agent}" is not on ${where}`, hint));
    }
  }
  return checks;
}

/** Whether a loop's schedule is what its record says, and can start what it names. */
async function checkSchedule(
  { name, dir, state }: LoopView,
  record: ScheduleRecord | null,
  isLive: boolean,
): Promise<DoctorCheck> {
  const label = `loop ${name}`;
  const again = `status --install-schedule ${name}`;
  const status = describeStatus(state!);
  if (record === null) return healthy(label, `${status}, no schedule`);
  const words = `${status}, ${describeSchedule(record)}`;
  const started = record.scheduler === "schtasks" ? record.runner[0]! : record.script;
  const missing = [started, record.runner[0]!].find((path) => !existsSync(path));
  if (missing !== undefined) {
    return complaint(label, isLive, `${words}: ${missing} is missing`, again);
  }
  const presence = await DRIVERS[record.scheduler].inspect(record, makeHost(dir));
  if (presence === "active" || (presence === "paused" && state!.status !== "running")) {
    return healthy(label, words);
  }
  if (presence === "unknown") {
    return complaint(label, false, `${words}: ${record.scheduler} gives no answer`, "retry");
  }
  const found = presence === "gone" ? "does not know it any more" : "has it disabled";
  return complaint(label, isLive, `${words}: ${record.scheduler} ${found}`, again);
}

/** The window of each model that loops verify or implement with, as their ticks will find it. */
async function checkContextWindows(
  { framework, project }: Invocation,
  loops: readonly LoopToCheck[],
): Promise<DoctorCheck[]> {
  const questions = new Map<string, { args: string[]; tokens: string; isLive: boolean }>();
  const ask = (model: string | undefined, tokens: string, isLive: boolean) => {
    const args = ["--loop-mode", ...(model === undefined ? [] : [`--model=${model}`])];
    const key = JSON.stringify([args, tokens]);
    questions.set(key, { args, tokens, isLive: isLive || questions.get(key)?.isLive === true });
  };
  const own = readEnv("AUTOMATON_CONTEXT_TOKENS") ?? "";
  for (const { view, record, isLive } of loops) {
    const roles = readConfigOrNull(view.dir)?.roles;
    const tokens = record === null ? own : record.context_tokens ?? "";
    for (const role of [roles?.implement, roles?.verify]) ask(role?.model, tokens, isLive);
  }
  if (questions.size === 0) ask(undefined, own, false);
  const program = findProgram(framework, "vram-detect");
  const checks: DoctorCheck[] = [];
  for (const { args, tokens, isLive } of questions.values()) {
    const env = {
      AUTOMATON_HOME: framework,
      AUTOMATON_PROJECT: project,
      AUTOMATON_CONTEXT_TOKENS: tokens,
    };
    const argv = [...program, ...args, "--json"];
    const outcome = await runCommand(argv, { env, timeoutMs: 60_000 });
    checks.push(judgeContextWindow(outcome, args[1], isLive));
  }
  return checks;
}

function judgeContextWindow(
  outcome: CommandOutcome,
  modelFlag: string | undefined,
  isLive: boolean,
): DoctorCheck {
  const of = modelFlag === undefined ? "" : ` of ${modelFlag.replace("--model=", "")}`;
  let report: unknown = null;
  try {
    report = JSON.parse(new TextDecoder().decode(outcome.stdout).trimEnd().split("\n").at(-1)!);
  } catch {
    // No report at all: what the program said instead is told.
  }
  const hint = "vram-detect --explain, or set AUTOMATON_CONTEXT_TOKENS";
  if (!isRecord(report) || typeof report.loop_mode_eligible !== "boolean") {
    const words = explainOutcome(["vram-detect"], outcome);
    return complaint("context window", isLive, `unknown${of}: ${words}`, hint);
  }
  const { available_context_tokens: tokens, floor_tokens: floor, reason, source } = report;
  const found = typeof tokens === "number"
    ? `${tokens} tokens${of} (${source})`
    : `unknown${of} (${reason})`;
  if (report.loop_mode_eligible) return healthy("context window", `${found}, floor ${floor}`);
  return complaint("context window", isLive, `${found}, below the floor of ${floor}`, hint);
}

/** Writes and removes a file where loops live; its time also tells whether clocks agree. */
function checkWriteAccess(project: string): DoctorCheck[] {
  const folder = [automatonDir(project), project].find(isDirectory)!;
  const probe = join(folder, `.doctor-${Deno.pid}`);
  try {
    Deno.writeTextFileSync(probe, "");
    const writtenMs = Deno.statSync(probe).mtime?.getTime() ?? Date.now();
    Deno.removeSync(probe);
    return [healthy("write access", folder), checkClock(project, writtenMs)];
  } catch (error) {
    const hint = `make ${folder} writable for this person`;
    return [complaint("write access", true, `${folder}: ${(error as Error).message}`, hint)];
  }
}

/**
 * Looks for signs that the clock is wrong: a file server that has another time, or ticks and slots in the
 * future.
 */
function checkClock(project: string, writtenMs: number): DoctorCheck {
  const now = Date.now();
  const hint = "set the clock (systemd: timedatectl set-ntp true)";
  const late = listLoops(project).find(({ state }) =>
    [state?.last_tick_at, state?.last_slot].some((time) =>
      Date.parse(time ?? "") > now + 30 * 60_000
    )
  );
  if (late !== undefined) {
    return complaint("clock", false, `loop ${late.name} last ticked in the future`, hint);
  }
  if (Math.abs(writtenMs - now) > CLOCK_SLACK_MS) {
    const seconds = Math.round((writtenMs - now) / 1000);
    return complaint("clock", false, `the file system's clock differs by ${seconds} s`, hint);
  }
  return healthy("clock", formatLocalTime(now));
}

async function checkDisk(project: string, host: SchedulerHost): Promise<DoctorCheck> {
  const unknown = (why: string) =>
    complaint("disk space", false, `cannot be told here: ${why}`, `look at ${project}`);
  if (Deno.build.os === "windows") return unknown("Windows has no df");
  const argv = ["df", "-Pk", project];
  const outcome = await host.run(argv);
  // POSIX: one line of heads, then name, size, used and free in KiB; only the name may hold blanks.
  const line = new TextDecoder().decode(outcome.stdout).trimEnd().split("\n").at(-1) ?? "";
  const free = /\s\d+\s+\d+\s+(\d+)\s+\d+%\s/.exec(line)?.[1];
  if (outcome.code !== 0 || free === undefined) return unknown(explainOutcome(argv, outcome));
  const mebibytes = Math.floor(Number(free) / 1024);
  const words = `${mebibytes} MiB free for ${project}`;
  if (mebibytes >= LOW_DISK_MIB) return healthy("disk space", words);
  return complaint("disk space", mebibytes < FULL_DISK_MIB, words, "make room");
}

function renderDiagnosis(checks: readonly DoctorCheck[]): string {
  const rows = checks.map(({ status, name, message }) => [status, name, message]);
  const lines = renderColumns(rows).trimEnd().split("\n");
  return checks.map(({ hint }, index) =>
    hint === null ? lines[index]! : `${lines[index]}\n         hint: ${hint}`
  ).join("\n");
}

function readLoopToCheck(view: LoopView): LoopToCheck {
  const loop = viewSchedule(view);
  return { ...loop, isLive: loop.record !== null && view.state?.status === "running" };
}

async function runDoctor(invocation: Invocation): Promise<Answer> {
  const { framework, project } = invocation;
  const host = makeHost(project);
  const loops = listLoops(project).map(readLoopToCheck);
  const programs = ["loop-runner", "status", "vram-detect"] as const;
  const checks: DoctorCheck[] = [
    checkDeno(framework),
    await checkGitVersion(host),
    ...await Promise.all(programs.map((name) => checkProgram(framework, name, host))),
    ...await checkSchedulers(loops, host),
  ];
  for (const loop of loops) checks.push(...await checkLoop(invocation, loop));
  checks.push(
    ...await checkContextWindows(invocation, loops),
    ...checkWriteAccess(project),
    await checkDisk(project, host),
  );
  const ok = checks.every(({ status }) => status !== "failure");
  return { json: { ok, project, checks }, text: renderDiagnosis(checks), exitCode: ok ? 0 : 1 };
}

// --- Command table ---

/** Options that go with commands. */
// deno-fmt-ignore -- a table: one row a line.
export const OPTIONS: readonly OptionSpec[] = [
  { name: "project", value: "DIR", help: "the project (default: AUTOMATON_PROJECT, else found from here)" },
  { name: "title", value: "TEXT", help: "a task's title" },
  { name: "phase", value: "PHASE", help: "the phase a task starts in (from implement on: counts as approved)" },
  { name: "reason", value: "TEXT", help: "why: of a step back, of a wait for a person; of a halt, one of its words" },
  { name: "detail", value: "TEXT", help: "more words for the log of a halt" },
  { name: "session", value: "ID", help: "who claims a task" },
  { name: "file", value: "PATH", help: "the file that is asked about" },
  { name: "loop", value: "NAME", help: "the loop that is meant" },
  { name: "loop-worktree", help: "the file lies in the loop's own worktree" },
  { name: "stalled-days", value: "N", help: `idle days after which a task counts as stalled (${DEFAULT_STALLED_DAYS})` },
  { name: "from-template", value: "NAME", help: "a folder of templates/loops/" },
  { name: "harness", value: "NAME", help: "how the agent is called: a file of templates/harnesses/" },
  { name: "no-worktree", help: "let the loop work in the project itself" },
  { name: "force", help: "lose what is nowhere else" },
  { name: "purge", help: "remove logs and outputs too" },
  { name: "now", help: "end the running harness instead of waiting for it" },
  { name: "interval", value: "S", help: "seconds between two ticks, 60 or more (default: the loop's own)" },
  { name: "scheduler", value: "NAME", help: `${SCHEDULERS.join(", ")} (default: what this system has); with --dry-run also ${PRINTED_SCHEDULERS.join(", ")}` },
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
  { name: "create-loop", value: "NAME", group: "Loops", help: "make a loop", takes: ["from-template", "harness", "no-worktree", "task"], needs: ["from-template"], writes: true, creates: true, run: runCreateLoop },
  { name: "remove-loop", value: "NAME", group: "Loops", help: "take a loop away; its branch and logs stay", takes: ["force", "purge", "lock-timeout"], writes: true, run: runRemoveLoop },
  { name: "install-schedule", value: "NAME", group: "Loops", help: "have the system's scheduler tick a loop (--dry-run: print the unit)", takes: ["interval", "scheduler", "dry-run", "lock-timeout"], writes: true, run: runInstallSchedule },
  { name: "uninstall-schedule", value: "NAME", group: "Loops", help: "take a loop's schedule away", takes: ["lock-timeout"], writes: true, run: runUninstallSchedule },
  { name: "pause-loop", value: "NAME", group: "Loops", help: "stop ticking (a running tick: before its next role)", takes: ["now"], writes: true, run: runPauseLoop },
  { name: "resume-loop", value: "NAME", group: "Loops", help: "tick again after a pause", takes: ["lock-timeout"], writes: true, run: runResumeLoop },
  { name: "halt-loop", value: "NAME", group: "Loops", help: "trip the brake by hand", takes: ["reason", "detail", "lock-timeout"], needs: ["reason"], writes: true, run: runHaltLoop },
  { name: "can-continue", value: "NAME", group: "Loops", help: "OK, HALTED, PAUSED or COMPLETE", takes: [], writes: false, run: runCanContinue },
  { name: "check-gate", value: "NAME", group: "Loops", help: "apply the brakes as before a tick", takes: ["task", "dry-run", "lock-timeout"], writes: true, run: runCheckGate },
  { name: "claim-loop-task", value: "NAME", group: "Loops", help: "make a --task the loop's own", takes: ["task", "lock-timeout"], needs: ["task"], writes: true, run: runClaimLoopTask },
  { name: "loop-list", group: "Loops", help: "all loops and how they are", takes: [], writes: false, run: runLoopList },
  { name: "loop-log", value: "NAME", group: "Loops", help: "the last lines of a loop's log", takes: ["lines", "follow"], writes: false, run: runLoopLog },
  { name: "doctor", group: "Loops", help: "what this machine, its scheduler and the loops lack (exit 1 on a failure)", takes: [], writes: false, anywhere: true, run: runDoctor },
  // Last: --task is an option of the others, and a command where none of them is given.
  { name: "task", value: "NAME", group: "Tasks", help: "show a task (or name one for another command)", takes: [], writes: false, run: runShowTask },
];

const COMMON_OPTIONS = ["project", "json"];

/**
 * The text of `--help`, from the two tables.
 *
 * @example
 * ```ts
 * import { renderHelp } from "./status.ts";
 * if (!renderHelp().includes("--check-gate NAME")) throw new Error(renderHelp());
 * ```
 */
export function renderHelp(): string {
  const groups = (["Tasks", "Loops"] as const).map((group) =>
    `${group}:\n${renderOptions(COMMANDS.filter((command) => command.group === group))}`
  );
  return `status: the task pipeline and the brakes of loops

Usage: status COMMAND [OPTION ...]

${groups.join("\n")}
Options:
${renderOptions(OPTIONS)}`.trimEnd();
}

/** Finds the one command of a command line, and refuses options that do not go with it. */
function selectCommand(given: ReadonlyMap<string, string | true>): Command {
  const named = COMMANDS.filter(({ name }) => given.has(name));
  const [command, second] = named;
  if (command === undefined) throw new UsageError("Cannot run without a command: see --help");
  if (second !== undefined && second.name !== "task") {
    throw new UsageError(
      `Cannot run "--${command.name}" and "--${second.name}" at once: give one command`,
    );
  }
  const fitting = [command.name, ...command.takes, ...COMMON_OPTIONS];
  const misfit = [...given.keys()].find((name) => !fitting.includes(name));
  if (misfit !== undefined) {
    const takes = [...command.takes, ...COMMON_OPTIONS].map((name) => `--${name}`).join(", ");
    throw new UsageError(`Cannot use "--${misfit}" with "--${command.name}": it takes ${takes}`);
  }
  const missing = command.needs?.find((name) => !given.has(name));
  if (missing !== undefined) {
    throw new UsageError(`Cannot run "--${command.name}": "--${missing}" is missing`);
  }
  return command;
}

/** The note of the run that this process belongs to, whatever has become of its environment (Linux). */
async function findSession(project: string): Promise<LockNote | null> {
  if (Deno.build.os !== "linux") return null;
  const notes = listLoopNames(project)
    .map((name) => readLockNote(join(loopsDir(project), name, ".state.lock")))
    .filter((note) => typeof note?.run_id === "string");
  if (notes.length === 0) return null;
  // Deno itself may not read /proc; what it starts has its limits.
  const { stdout } = await runCommand(["cat", "/proc/self/limits"]);
  const limit = /^Max file locks +(\S+)/m.exec(new TextDecoder().decode(stdout))?.[1];
  return notes.find((note) => markLimit(note!.run_id!) === limit) ?? null;
}

/** Refuses what a harness's role may not do, and what only a person may. */
async function guardRole(command: Command, { given, project }: Invocation): Promise<void> {
  if (!command.writes) return;
  const actor = describeActor();
  const [loop, role, task] = ["LOOP", "ROLE", "TASK"].map((name) => readEnv(`AUTOMATON_${name}`));
  const refuse = (why: string) =>
    new RefusedError(
      `Cannot run "--${command.name}" as ${actor}: ${why}`,
      "leave it to a person or to the tick",
    );
  const session = await findSession(project);
  if (session !== null) {
    const noted = [session.loop, session.role, session.task ?? undefined];
    // No role: the tick has ended its session, or is not this process's at all.
    if (session.role === null || noted.join("\n") !== [loop, role, task].join("\n")) {
      throw refuse(`a session of loop ${session.loop} asks, whose environment says otherwise`);
    }
  }
  if (actor === "person") return;
  if (command.name === "approve") throw refuse("only a person approves");
  if (role === undefined) return; // The tick itself, not a session in it.
  if (role !== "orchestrate") throw refuse(`the role ${role} may change nothing`);
  const home = readEnv("AUTOMATON_PROJECT");
  const isOwnTask = task !== undefined && task === given.get("task");
  const isOwnProject = home === undefined || resolve(home) === resolve(project);
  if (command.name === "transition" && isOwnTask && isOwnProject) return;
  throw refuse(`this role may run one --transition --task ${task ?? "NAME"}`);
}

/** Tells the loop's log what a session of it was refused. */
function logRefusal(project: string, message: string): void {
  const loop = readEnv("AUTOMATON_LOOP");
  if (loop === undefined || !NAME_PATTERN.test(loop)) return;
  const dir = join(loopsDir(project), loop);
  if (isLoopDir(dir)) logEvent(dir, "WARNING", "REFUSED", { message });
}

/** The project; the framework's own folder for a command that makes sense without one. */
function findCommandProject(
  command: Command,
  given: ReadonlyMap<string, string | true>,
  framework: string,
): string {
  const flag = given.get("project");
  try {
    return findProjectDir(typeof flag === "string" ? flag : undefined, !!command.creates);
  } catch (error) {
    const isNamed = flag !== undefined || readEnv("AUTOMATON_PROJECT") !== undefined;
    if (command.anywhere && !isNamed) return framework;
    throw error;
  }
}

async function runCommandLine(
  given: ReadonlyMap<string, string | true>,
  framework: string,
): Promise<Answer> {
  if (given.has("help")) return { json: { help: renderHelp() }, text: renderHelp() };
  if (given.has("version")) {
    const version = readVersion(framework);
    return { json: { version }, text: `status ${version}` };
  }
  const command = selectCommand(given);
  readLockTimeoutMs(given); // A wrong one is told also where nothing waits for a lock.
  const project = findCommandProject(command, given, framework);
  const invocation = { given, framework, project };
  try {
    await guardRole(command, invocation);
    return await command.run(invocation);
  } catch (error) {
    const isSession = readEnv("AUTOMATON_ROLE") !== undefined;
    if (isSession && error instanceof RefusedError) logRefusal(project, error.message);
    throw error;
  }
}

// --- Main ---

/** Runs one command line; returns the exit code. */
export async function runStatus(args: readonly string[]): Promise<number> {
  try {
    const given = parseCommandLine(args, [...COMMANDS, ...OPTIONS]);
    clearGitEnvironment();
    const answer = await runCommandLine(given, findFrameworkDir(import.meta.url));
    if (given.has("json")) console.log(JSON.stringify({ schema_version: 1, ...answer.json }));
    else console.log(escapeControls(answer.text));
    if (answer.hint !== undefined) console.error(`hint: ${answer.hint}`);
    return answer.exitCode ?? 0;
  } catch (error) {
    return reportFailure(error, "status", args);
  }
}

if (import.meta.main) Deno.exit(await runStatus(Deno.args));
