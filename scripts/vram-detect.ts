#!/usr/bin/env -S deno run -q --no-prompt -P=vram-detect
/**
 * vram-detect: how many tokens of context a model can hold on this machine.
 *
 * Prints one number with its derivation, or null with a reason. The number comes from the first of:
 * AUTOMATON_CONTEXT_TOKENS, a declaration in models.json, a model file measured against the memory
 * of the machine. There is no default: where nothing is known, nothing is claimed.
 *
 * Reads: `<project>/.automaton/models.json`, else `<framework>/.automaton/models.json`, else
 * `<framework>/models.json` (the first that exists, whole; they are not merged). Writes nothing.
 * Environment: AUTOMATON_CONTEXT_TOKENS, AUTOMATON_HOME, AUTOMATON_PROJECT, HOME, USERPROFILE.
 * Permissions: read, env, run; no network, no writing.
 * Exit codes: 0 a figure was found, 1 none could be, 2 usage error.
 *
 * @module
 */

import { parseArgs } from "@std/cli";
import { parse as parseJsonc } from "@std/jsonc";
import { dirname, fromFileUrl, join } from "@std/path";

// --- Constants ---

/** Smallest window, in tokens, in which a loop may run (the project's own rule). */
export const FLOOR_TOKENS = 16000;

// --- Types ---

/** Where the answer comes from. */
export type ContextSource = "env" | "models.json" | "gguf" | "hf" | "ollama" | "none";

/** One model of models.json. */
export interface ModelEntry {
  /** Declared window in tokens, or null when it is to be measured. */
  contextTokens: number | null;
}

/** models.json, checked. */
export interface ModelsFile {
  path: string;
  defaultName: string | null;
  models: Map<string, ModelEntry>;
}

/** What `--json` prints; the field names are the contract. */
export interface DetectReport {
  schema_version: 1;
  available_context_tokens: number | null;
  available_context_kb: number | null;
  loop_mode_eligible: boolean;
  floor_tokens: number;
  reason: string | null;
  hint: string | null;
  source: ContextSource;
  model: { name: string } | null;
  devices: unknown[];
  memory: Record<string, unknown>;
  budget: Record<string, unknown>;
  assumptions: Record<string, unknown>;
  warnings: string[];
}

interface DetectOptions {
  isJson: boolean;
  isLoopMode: boolean;
  modelName: string | null;
}

/** What the detection asks of the world outside. */
interface DetectWorld {
  getEnv(name: string): string | undefined;
  modelsFilePaths: string[];
}

// --- Errors ---

class DetectUsageError extends Error {}

/** No figure can be given: the message is the reason, the hint what to do next. */
class NoFigureError extends Error {
  constructor(message: string, readonly hint: string | null = null) {
    super(message);
  }
}

// --- Parsing and formatting ---

/**
 * Reads a number of tokens from text.
 *
 * @param text Decimal digits, blanks around them allowed.
 * @param name What the text is called in the message.
 * @returns Tokens, at least 1.
 * @throws RangeError when it is not a whole number above 0.
 *
 * @example
 * ```ts
 * parseTokenCount("131072", "AUTOMATON_CONTEXT_TOKENS"); // 131072
 * ```
 */
export function parseTokenCount(text: string, name: string): number {
  const tokens = /^\s*\d+\s*$/.test(text) ? Number(text) : NaN;
  if (Number.isSafeInteger(tokens) && tokens > 0) return tokens;
  throw new RangeError(`Cannot read ${name} "${text}": not a whole number of tokens above 0`);
}

/**
 * Reads models.json.
 *
 * @param text JSON, comments and trailing commas allowed.
 * @param path The file's path, for messages.
 * @returns The models by name.
 * @throws SyntaxError not JSON. TypeError a field of the wrong type. RangeError a value out of range.
 */
export function parseModelsFile(text: string, path: string): ModelsFile {
  const root = parseModelsJson(text, path);
  const models = new Map<string, ModelEntry>();
  const list = root["models"] ?? {};
  if (!isPlainObject(list)) throw new TypeError(describeField(path, "models", list, "an object"));
  for (const [name, entry] of Object.entries(list)) {
    models.set(name, parseModelEntry(entry, path, `models.${name}`));
  }
  const defaultName = root["default"] ?? null;
  if (defaultName !== null && typeof defaultName !== "string") {
    throw new TypeError(describeField(path, "default", defaultName, "a model's name"));
  }
  return { path, defaultName, models };
}

function parseModelsJson(text: string, path: string): Record<string, unknown> {
  let root: unknown;
  try {
    root = parseJsonc(text);
  } catch (error) {
    const found = error instanceof Error ? error.message : String(error);
    throw new SyntaxError(`Cannot read models file "${path}": ${found}`);
  }
  if (!isPlainObject(root)) {
    throw new TypeError(`Cannot read models file "${path}": not a JSON object`);
  }
  return root;
}

function parseModelEntry(entry: unknown, path: string, field: string): ModelEntry {
  if (!isPlainObject(entry)) throw new TypeError(describeField(path, field, entry, "an object"));
  const tokens = entry["context_tokens"] ?? null;
  if (tokens === null) return { contextTokens: null };
  if (typeof tokens !== "number") {
    throw new TypeError(describeField(path, `${field}.context_tokens`, tokens, "a number"));
  }
  if (!Number.isSafeInteger(tokens) || tokens <= 0) {
    const wanted = "a whole number of tokens above 0";
    throw new RangeError(describeField(path, `${field}.context_tokens`, tokens, wanted));
  }
  return { contextTokens: tokens };
}

function describeField(path: string, field: string, value: unknown, wanted: string): string {
  return `Cannot read models file "${path}": ${field} is ${JSON.stringify(value)}, not ${wanted}`;
}

function isPlainObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

// --- Input and output ---

function readModelsFile(paths: readonly string[]): ModelsFile | null {
  for (const path of paths) {
    let text: string;
    try {
      text = Deno.readTextFileSync(path);
    } catch (error) {
      if (error instanceof Deno.errors.NotFound) continue;
      const found = error instanceof Error ? error.message : String(error);
      throw new NoFigureError(`Cannot read models file "${path}": ${found}`);
    }
    return parseModelsFile(text, path);
  }
  return null;
}

function findFrameworkDir(): string {
  const home = Deno.env.get("AUTOMATON_HOME");
  if (home) return home;
  if (Deno.build.standalone) return dirname(dirname(Deno.execPath()));
  return dirname(dirname(fromFileUrl(import.meta.url)));
}

function findProjectDir(): string | null {
  const named = Deno.env.get("AUTOMATON_PROJECT");
  if (named) return named;
  for (let dir = Deno.cwd();; dir = dirname(dir)) {
    try {
      if (Deno.statSync(join(dir, ".automaton")).isDirectory) return dir;
    } catch {
      // Not here: look further up.
    }
    if (dirname(dir) === dir) return null;
  }
}

function listModelsFiles(): string[] {
  const project = findProjectDir();
  const framework = findFrameworkDir();
  return [
    ...(project === null ? [] : [join(project, ".automaton", "models.json")]),
    join(framework, ".automaton", "models.json"),
    join(framework, "models.json"),
  ];
}

// --- Commands ---

function newReport(): DetectReport {
  return {
    schema_version: 1,
    available_context_tokens: null,
    available_context_kb: null,
    loop_mode_eligible: false,
    floor_tokens: FLOOR_TOKENS,
    reason: null,
    hint: null,
    source: "none",
    model: null,
    devices: [],
    memory: {},
    budget: {},
    assumptions: {},
    warnings: [],
  };
}

function setFigure(report: DetectReport, source: ContextSource, tokens: number): void {
  report.source = source;
  report.available_context_tokens = tokens;
  report.available_context_kb = tokens;
  report.loop_mode_eligible = tokens >= FLOOR_TOKENS;
  if (report.loop_mode_eligible) return;
  report.reason = `context window of ${tokens} tokens is below the floor of ${FLOOR_TOKENS} tokens`;
  report.hint = "vram-detect --explain";
}

function detect(options: DetectOptions, world: DetectWorld): DetectReport {
  const report = newReport();
  try {
    const declared = world.getEnv("AUTOMATON_CONTEXT_TOKENS") ?? "";
    if (declared !== "") {
      setFigure(report, "env", parseTokenCount(declared, "AUTOMATON_CONTEXT_TOKENS"));
      return report;
    }
    measureModel(report, options, world);
  } catch (error) {
    if (!(error instanceof Error)) throw error;
    report.reason = error.message;
    report.hint = error instanceof NoFigureError ? error.hint : null;
  }
  return report;
}

function measureModel(report: DetectReport, options: DetectOptions, world: DetectWorld): void {
  const file = readModelsFile(world.modelsFilePaths);
  const name = options.modelName ?? file?.defaultName ?? null;
  if (name === null) {
    throw new NoFigureError(
      "no model is declared: no AUTOMATON_CONTEXT_TOKENS, no --model, no default in models.json",
      `write ${world.modelsFilePaths[0]} or set AUTOMATON_CONTEXT_TOKENS`,
    );
  }
  report.model = { name };
  const entry = file?.models.get(name);
  if (entry === undefined) {
    throw new NoFigureError(
      `model "${name}" is not in ${file?.path ?? "models.json"}`,
      `write ${world.modelsFilePaths[0]}`,
    );
  }
  if (entry.contextTokens === null) {
    throw new NoFigureError(
      `model "${name}" declares no context_tokens in ${file?.path}`,
      "declare context_tokens",
    );
  }
  setFigure(report, "models.json", entry.contextTokens);
}

// --- Main ---

const HELP = `Usage: vram-detect [options]

How many tokens of context a model can hold on this machine.

Options:
  --model NAME  a model of models.json (default: its default)
  --loop-mode   judge the figure against the floor for loops
  --json        one line of JSON
  --help        this text
  --version     the version
`;

function parseDetectOptions(args: readonly string[]): DetectOptions | "help" | "version" {
  const known = ["model", "loop-mode", "json", "help", "version"];
  const parsed = parseArgs([...args], {
    string: ["model"],
    boolean: ["loop-mode", "json", "help", "version"],
    unknown: (arg) => {
      throw new DetectUsageError(
        `Cannot use "${arg}": no such option; known are ${known.map((k) => `--${k}`).join(", ")}`,
      );
    },
  });
  if (parsed["help"]) return "help";
  if (parsed["version"]) return "version";
  if (parsed["model"] === "") {
    throw new DetectUsageError('Cannot use "--model": its value is missing');
  }
  return {
    isJson: Boolean(parsed["json"]),
    isLoopMode: Boolean(parsed["loop-mode"]),
    modelName: typeof parsed["model"] === "string" ? parsed["model"] : null,
  };
}

function main(args: readonly string[]): number {
  const options = parseDetectOptions(args);
  if (options === "help") {
    console.log(HELP.trimEnd());
    return 0;
  }
  if (options === "version") {
    const text = Deno.readTextFileSync(join(findFrameworkDir(), "config.md"));
    console.log(`vram-detect ${text.match(/^version: (\S+)/m)?.[1] ?? "unknown"}`);
    return 0;
  }
  const world = {
    getEnv: (name: string) => Deno.env.get(name),
    modelsFilePaths: listModelsFiles(),
  };
  const report = detect(options, world);
  if (options.isJson) console.log(JSON.stringify(report));
  else if (report.available_context_tokens !== null) console.log(report.available_context_tokens);
  if (!options.isJson && report.reason !== null) {
    console.error(report.reason);
    if (report.hint !== null) console.error(`hint: ${report.hint}`);
  }
  return report.available_context_tokens === null ? 1 : 0;
}

if (import.meta.main) {
  try {
    Deno.exit(main(Deno.args));
  } catch (error) {
    if (!(error instanceof DetectUsageError)) throw error;
    console.error(error.message);
    console.error("hint: vram-detect --help");
    Deno.exit(2);
  }
}
