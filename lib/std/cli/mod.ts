/**
 * Stand-in for `@std/cli` 1.0.32: the part of `parseArgs` that the project uses.
 *
 * Left out are aliases, `negatable`, `stopEarly`, `boolean: true`, several letters after one dash (`-abc`
 * is an option named `abc` here) and dots in names, which the package turns into nested objects.
 *
 * @module
 */

/** What the command line may hold. */
export interface ParseOptions {
  /** Keep what follows `--` apart, in the result's `"--"`. */
  "--"?: boolean;
  /** Options that take no value; false when absent. */
  boolean?: string | readonly string[];
  /** Options that may be given several times; the values form an array. */
  collect?: string | readonly string[];
  /** Values of options that are absent. */
  default?: Readonly<Record<string, unknown>>;
  /** Options whose value stays a string; `""` when the value is missing. */
  string?: string | readonly string[];
  /** Called with each argument or option that is not declared; false leaves it out of the result. */
  unknown?: (arg: string, key?: string, value?: unknown) => unknown;
}

/** The options found, with `_` for the arguments that belong to none. */
export type Args = Record<string, unknown> & { _: (string | number)[]; "--"?: string[] };

const OPTION = /^--?(.+?)(?:=(.+))?$/s;
const NUMBER = /^(?:0x[0-9a-f]+|[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?)$/i;

/**
 * Parses a command line.
 *
 * An argument that starts with `-` is never taken as the value of the option before it.
 *
 * @param args The arguments, without the program's name.
 * @param options Which options exist and what they take.
 * @returns The options by name; numbers where the text is one and the option is not a `string`.
 *
 * @example
 * ```ts
 * parseArgs(["--mode=tick", "--json"], { string: ["mode"], boolean: ["json"] });
 * // { _: [], mode: "tick", json: true }
 * ```
 */
export function parseArgs(args: string[], options: ParseOptions = {}): Args {
  const strings = namesOf(options.string);
  const booleans = namesOf(options.boolean);
  const collects = namesOf(options.collect);
  const result: Args = { _: [] };

  const store = (key: string, value: string | boolean, arg: string): void => {
    const isDeclared = strings.has(key) || booleans.has(key);
    if (!isDeclared && options.unknown?.(arg, key, value) === false) return;
    const typed = strings.has(key) ? value : toNumber(value);
    const before = result[key];
    if (!collects.has(key)) result[key] = typed;
    else if (Array.isArray(before)) before.push(typed);
    else result[key] = [typed];
  };

  const end = args.indexOf("--");
  const words = end < 0 ? args : args.slice(0, end);
  const rest = end < 0 ? [] : args.slice(end + 1);
  for (let i = 0; i < words.length; i++) {
    const arg = words[i] ?? "";
    const next = words[i + 1];
    const [, key, value] = OPTION.exec(arg) ?? [];
    if (key === undefined) {
      if (options.unknown?.(arg) === false) continue;
      result._.push(strings.has("_") ? arg : toNumber(arg));
    } else if (value !== undefined) {
      store(key, booleans.has(key) ? value !== "false" : value, arg);
    } else if (next && !booleans.has(key) && !next.startsWith("-")) {
      store(key, next, arg);
      i++;
    } else if (next === "true" || next === "false") {
      store(key, next === "true", arg);
      i++;
    } else {
      store(key, strings.has(key) ? "" : true, arg);
    }
  }

  for (const [key, value] of Object.entries(options.default ?? {})) {
    if (!Object.hasOwn(result, key)) result[key] = value;
  }
  for (const key of booleans) {
    if (!Object.hasOwn(result, key)) result[key] = collects.has(key) ? [] : false;
  }
  for (const key of strings) {
    if (!Object.hasOwn(result, key) && collects.has(key)) result[key] = [];
  }
  if (options["--"]) result["--"] = rest;
  else result._.push(...rest);
  return result;
}

function namesOf(names: string | readonly string[] = []): Set<string> {
  return new Set(typeof names === "string" ? [names] : names);
}

function toNumber<T extends string | boolean>(value: T): T | number {
  return typeof value === "string" && NUMBER.test(value) ? Number(value) : value;
}
