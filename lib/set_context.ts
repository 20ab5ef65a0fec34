/**
 * Writes how many tokens of context the default model has into a models.json. Everything else in the
 * file stays as it is, comments included; a file that is not there is made. Used by install.sh.
 *
 * `deno run --allow-read --allow-write set_context.ts TOKENS FILE`: exit 0 or 1.
 *
 * @module
 */

import { parse } from "@std/jsonc";

const NEW_FILE = '{\n  "default": "default",\n  "models": {}\n}\n';

/** Where the value of a member begins and ends; of an object or a list only its first character. */
interface Span {
  readonly start: number;
  readonly end: number;
}

/** Puts blanks in the place of comments, so that offsets stay. */
function blankComments(text: string): string {
  return text.replace(
    /"(?:\\.|[^"\\])*"|\/\/[^\n]*|\/\*[^]*?\*\//g,
    (token) => token.startsWith('"') ? token : token.replace(/[^\n]/g, " "),
  );
}

/** Finds a member of the object that opens at an offset; like a parser, the last of two wins. */
function findMember(text: string, open: number, name: string): Span | null {
  const tokens = /"(?:\\.|[^"\\])*"|[{}[\],:]|[^\s{}[\],:"]+/g;
  tokens.lastIndex = open + 1;
  let [depth, key, found]: [number, string | null, Span | null] = [0, null, null];
  let before = "";
  for (let match = tokens.exec(text); match !== null && depth >= 0; match = tokens.exec(text)) {
    const [token] = match;
    if (depth === 0 && before === ":" && key === name) {
      found = { start: match.index, end: tokens.lastIndex };
    }
    if (depth === 0 && token === ":") key = JSON.parse(before);
    if (token === "{" || token === "[") depth++;
    if (token === "}" || token === "]") depth--;
    before = token;
  }
  return found;
}

/** Adds a first member to the object that opens at an offset. */
function addMember(text: string, open: number, member: string): string {
  const isEmpty = /^\s*\}/.test(blankComments(text).slice(open + 1));
  return `${text.slice(0, open + 1)} ${member}${isEmpty ? " " : ","}${text.slice(open + 1)}`;
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * Sets the context window of the default model.
 *
 * @param text A models.json, comments and trailing commas allowed.
 * @throws {SyntaxError|TypeError} Where the text is no JSON, or names no default model.
 * @example
 * ```ts
 * import { assertEquals } from "@std/assert";
 * const text = '{ "default": "m", "models": { "m": { "local": true } } } // mine';
 * assertEquals(
 *   setContextTokens(text, 32768),
 *   '{ "default": "m", "models": { "m": { "context_tokens": 32768, "local": true } } } // mine',
 * );
 * ```
 */
export function setContextTokens(text: string, tokens: number): string {
  const models = parse(text);
  if (!isRecord(models) || !isRecord(models.models)) throw new TypeError("it holds no models");
  const name = models.default;
  if (typeof name !== "string" || name === "") throw new TypeError("it names no default model");
  const plain = blankComments(text);
  const top = plain.indexOf("{");
  const list = findMember(plain, top, "models")!;
  const model = findMember(plain, list.start, name);
  const member = `"context_tokens": ${tokens}`;
  if (model === null) {
    return addMember(text, list.start, `${JSON.stringify(name)}: { ${member} }`);
  }
  if (!isRecord(models.models[name])) throw new TypeError(`model "${name}" is no object`);
  const value = findMember(plain, model.start, "context_tokens");
  if (value === null) return addMember(text, model.start, member);
  return text.slice(0, value.start) + tokens + text.slice(value.end);
}

function readIfPresent(path: string): string | null {
  try {
    return Deno.readTextFileSync(path);
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return null;
    throw error;
  }
}

/** Writes beside the file and renames, so that it is never half a file. */
function replaceFile(path: string, text: string): void {
  const temporary = `${path}.new`;
  Deno.writeTextFileSync(temporary, text);
  Deno.renameSync(temporary, path);
}

if (import.meta.main) {
  const [tokens = "", path = ""] = Deno.args;
  try {
    const before = readIfPresent(path);
    const after = setContextTokens(before ?? NEW_FILE, Number(tokens));
    if (after !== before) replaceFile(path, after);
  } catch (error) {
    console.error(
      `Cannot set context_tokens in "${path}": ${error instanceof Error ? error.message : error}`,
    );
    Deno.exit(1);
  }
}
