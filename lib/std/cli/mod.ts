/**
 * Stand-in for `@std/cli` 1.0.32: the part of `parseArgs` that the project uses.
 *
 * Option names are taken as they are written: the package's nesting of dotted names is left out, as
 * are `negatable` and `boolean: true`.
 *
 * @module
 */

/** What the command line may hold. */
export interface ParseOptions {
  /** Keep what follows `--` apart, in the result's `"--"`. */
  "--"?: boolean;
  /** Other names of an option; each name receives the value. */
  alias?: Readonly<Record<string, string | readonly string[]>>;
  /** Options that take no value; false when absent. */
  boolean?: string | readonly string[];
  /** Options that may be given several times; the values form an array. */
  collect?: string | readonly string[];
  /** Values of options that are absent. */
  default?: Readonly<Record<string, unknown>>;
  /** Stop at the first argument that is no option. */
  stopEarly?: boolean;
  /** Options whose value stays a string; `""` when the value is missing. */
  string?: string | readonly string[];
  /** Called with each argument or option that is not declared; false leaves it out of the result. */
  unknown?: (arg: string, key?: string, value?: unknown) => unknown;
}

/** The options found, with `_` for the arguments that belong to none. */
export type Args = Record<string, unknown> & { _: (string | number)[]; "--"?: string[] };

const FLAG = /^-(?:(-)(no-)?)?(.+?)(?:=(.+?))?$/s;
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
  const aliases = aliasMap(options.alias ?? {});
  const strings = namesOf(options.string, aliases);
  const booleans = namesOf(options.boolean, aliases);
  const collects = namesOf(options.collect, aliases);
  const result: Args = { _: [] };

  const end = args.indexOf("--");
  const words = end < 0 ? args : args.slice(0, end);
  const rest = end < 0 ? [] : args.slice(end + 1);

  const store = (key: string, value: string | boolean, arg: string): void => {
    const isKnown = strings.has(key) || booleans.has(key) || aliases.has(key);
    if (!isKnown && options.unknown?.(arg, key, value) === false) return;
    const typed = strings.has(key) ? value : toNumber(value);
    for (const name of [key, ...(aliases.get(key) ?? [])]) {
      const before = result[name];
      if (!collects.has(name)) result[name] = typed;
      else if (Array.isArray(before)) before.push(typed);
      else result[name] = [typed];
    }
  };

  /** Stores an option that had no `=`; returns how many of the next words it took. */
  const storeWithNext = (key: string, next: string | undefined, arg: string): number => {
    const isBooleanText = next === "true" || next === "false";
    if (next && !booleans.has(key) && !next.startsWith("-")) store(key, next, arg);
    else if (isBooleanText) store(key, next === "true", arg);
    else {
      store(key, strings.has(key) ? "" : true, arg);
      return 0;
    }
    return 1;
  };

  for (let i = 0; i < words.length; i++) {
    const arg = words[i] ?? "";
    const [, isLong, no = "", name = "", value] = FLAG.exec(arg) ?? [];
    if (isLong) {
      const key = no + name;
      if (value === undefined) i += storeWithNext(key, words[i + 1], arg);
      else store(name, booleans.has(name) ? value !== "false" : value, arg);
    } else if (name) {
      i += storeLetters(arg, words[i + 1], { strings, store, storeWithNext });
    } else {
      if (options.unknown?.(arg) !== false) {
        result._.push(strings.has("_") ? arg : toNumber(arg));
      }
      if (options.stopEarly) {
        result._.push(...words.slice(i + 1));
        break;
      }
    }
  }

  addDefaults(result, { aliases, booleans, strings, collects, values: options.default ?? {} });
  if (options["--"]) result["--"] = rest;
  else result._.push(...rest);
  return result;
}

/** Takes `-abc`, `-n5`, `-n=5` and `-n 5` apart; returns how many of the next words were used. */
function storeLetters(
  arg: string,
  next: string | undefined,
  parser: {
    strings: ReadonlySet<string>;
    store: (key: string, value: string | boolean, arg: string) => void;
    storeWithNext: (key: string, next: string | undefined, arg: string) => number;
  },
): number {
  const { strings, store, storeWithNext } = parser;
  for (let i = 1; i < arg.length - 1; i++) {
    const letter = arg.charAt(i);
    const after = arg.slice(i + 1);
    const equals = /[A-Za-z]/.test(letter) ? /=(.+)/.exec(after)?.[1] : undefined;
    const attached = equals ??
      (/^(?:-?\d+(?:\.\d*)?(?:e-?\d+)?$|\W)/.test(after) ? after : undefined);
    if (attached !== undefined) {
      store(letter, attached, arg);
      return 0;
    }
    store(letter, strings.has(letter) ? "" : true, arg);
  }
  return storeWithNext(arg.slice(-1), next, arg);
}

function addDefaults(
  result: Args,
  known: {
    aliases: ReadonlyMap<string, readonly string[]>;
    booleans: ReadonlySet<string>;
    strings: ReadonlySet<string>;
    collects: ReadonlySet<string>;
    values: Readonly<Record<string, unknown>>;
  },
): void {
  for (const [key, value] of Object.entries(known.values)) {
    if (Object.hasOwn(result, key)) continue;
    for (const name of [key, ...(known.aliases.get(key) ?? [])]) result[name] = value;
  }
  for (const key of known.booleans) {
    if (!Object.hasOwn(result, key)) result[key] = known.collects.has(key) ? [] : false;
  }
  for (const key of known.strings) {
    if (!Object.hasOwn(result, key) && known.collects.has(key)) result[key] = [];
  }
}

function aliasMap(alias: NonNullable<ParseOptions["alias"]>): Map<string, readonly string[]> {
  const map = new Map<string, readonly string[]>();
  for (const [key, value] of Object.entries(alias)) {
    const names = [key, ...(typeof value === "string" ? [value] : value)];
    for (const name of names) map.set(name, names.filter((other) => other !== name));
  }
  return map;
}

function namesOf(
  names: string | readonly string[] | undefined,
  aliases: ReadonlyMap<string, readonly string[]>,
): Set<string> {
  const list = typeof names === "string" ? [names] : names ?? [];
  return new Set(list.flatMap((name) => [name, ...(aliases.get(name) ?? [])]));
}

function toNumber<T extends string | boolean>(value: T): T | number {
  return typeof value === "string" && NUMBER.test(value) ? Number(value) : value;
}
