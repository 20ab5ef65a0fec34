/**
 * Stand-in for `@std/path` 1.1.6: `join`, `resolve`, `dirname`, `basename`, `relative`, `isAbsolute`,
 * `normalize`, `fromFileUrl`, `toFileUrl`, `SEPARATOR`.
 *
 * Written out for POSIX, because loading `node:path` would slow every start by a third; only Windows loads it.
 *
 * @module
 */

/** The functions whose meaning depends on the system. */
interface PathModule {
  join(...paths: string[]): string;
  resolve(...paths: string[]): string;
  dirname(path: string): string;
  basename(path: string, suffix?: string): string;
  relative(from: string, to: string): string;
  isAbsolute(path: string): boolean;
  normalize(path: string): string;
  fromFileUrl(url: string | URL): string;
  toFileUrl(path: string): URL;
  readonly SEPARATOR: "/" | "\\";
}

const posix: PathModule = {
  SEPARATOR: "/",
  isAbsolute: (path) => path.startsWith("/"),
  normalize(path) {
    const root = path.startsWith("/") ? "/" : "";
    const kept = dropDots(path.split("/"), root !== "").join("/");
    const end = kept !== "" && path.endsWith("/") ? "/" : "";
    return root + kept + end || (path.endsWith("/") && path !== "" ? "./" : ".");
  },
  join: (...paths) => posix.normalize(paths.filter((path) => path !== "").join("/")),
  resolve(...paths) {
    let path = "";
    for (let i = paths.length - 1; i >= 0 && !path.startsWith("/"); i--) {
      const part = paths[i];
      if (part) path = path ? `${part}/${path}` : part;
    }
    if (!path.startsWith("/")) path = path ? `${Deno.cwd()}/${path}` : Deno.cwd();
    return "/" + dropDots(path.split("/"), true).join("/");
  },
  dirname(path) {
    const trimmed = trimSlashes(path);
    const end = trimmed.lastIndexOf("/");
    if (end < 0) return path.startsWith("/") ? "/" : ".";
    return trimSlashes(trimmed.slice(0, end)) || "/";
  },
  basename(path, suffix = "") {
    const trimmed = trimSlashes(path);
    const name = trimmed.slice(trimmed.lastIndexOf("/") + 1) || (path.startsWith("/") ? "/" : "");
    return suffix && name !== suffix && name.endsWith(suffix)
      ? name.slice(0, -suffix.length)
      : name;
  },
  relative(from, to) {
    const start = posix.resolve(from).split("/").filter(Boolean);
    const target = posix.resolve(to).split("/").filter(Boolean);
    let common = 0;
    while (common < start.length && start[common] === target[common]) common++;
    return [...start.slice(common).fill(".."), ...target.slice(common)].join("/");
  },
  fromFileUrl: (url) =>
    decodeURIComponent(fileUrl(url).pathname.replace(/%(?![0-9A-Fa-f]{2})/g, "%25")),
  toFileUrl(path) {
    if (!posix.isAbsolute(path)) throw notAbsolute(path);
    const url = new URL("file:///");
    url.pathname = encodePath(path);
    return url;
  },
};

async function loadWindows(): Promise<PathModule> {
  const { win32 } = (await import("node:path")).default;
  const { fileURLToPath, pathToFileURL } = await import("node:url");
  return {
    ...win32,
    SEPARATOR: "\\",
    fromFileUrl: (url) => fileURLToPath(fileUrl(url)),
    toFileUrl(path) {
      if (!win32.isAbsolute(path)) throw notAbsolute(path);
      return pathToFileURL(path);
    },
  };
}

const path: PathModule = Deno.build.os === "windows" ? await loadWindows() : posix;

/**
 * Joins parts into one normalized path.
 *
 * @param paths The parts; empty ones are skipped.
 * @returns The path, `"."` when nothing is left.
 */
export const join: (...paths: string[]) => string = path.join;

/**
 * Makes a path absolute: the last absolute part wins, the working directory comes first.
 *
 * @param paths The parts.
 * @returns An absolute, normalized path without a slash at the end.
 */
export const resolve: (...paths: string[]) => string = path.resolve;

/**
 * Names the folder that holds a path.
 *
 * @param path The path.
 * @returns The folder, `"."` when there is none in the path.
 */
export const dirname: (path: string) => string = path.dirname;

/**
 * Takes the last part of a path.
 *
 * @param path The path.
 * @param suffix An ending to leave out.
 * @returns The name.
 */
export const basename: (path: string, suffix?: string) => string = path.basename;

/**
 * Finds the way from one folder to another path.
 *
 * @param from Where it starts.
 * @param to Where it leads.
 * @returns A relative path, `""` when both are the same.
 */
export const relative: (from: string, to: string) => string = path.relative;

/**
 * Tells whether a path starts at the root.
 *
 * @param path The path.
 * @returns True if it does.
 */
export const isAbsolute: (path: string) => boolean = path.isAbsolute;

/**
 * Takes out `.`, `..` and doubled separators. A separator at the end is kept.
 *
 * @param path The path.
 * @returns The short form, `"."` for an empty path.
 */
export const normalize: (path: string) => string = path.normalize;

/**
 * Turns a file: URL into a path.
 *
 * @param url The URL.
 * @returns The path.
 * @throws {TypeError} If the URL is of another kind.
 */
export const fromFileUrl: (url: string | URL) => string = path.fromFileUrl;

/**
 * Turns an absolute path into a file: URL.
 *
 * @param path The path.
 * @returns The URL.
 * @throws {TypeError} If the path is relative.
 */
export const toFileUrl: (path: string) => URL = path.toFileUrl;

/** What separates the parts of a path here. */
export const SEPARATOR: "/" | "\\" = path.SEPARATOR;

/** Resolves `.` and `..`; a relative path keeps the `..` that lead out of it. */
function dropDots(parts: readonly string[], isRooted: boolean): string[] {
  const kept: string[] = [];
  for (const part of parts) {
    if (part === "" || part === ".") continue;
    if (part !== "..") kept.push(part);
    else if (kept.length > 0 && kept.at(-1) !== "..") kept.pop();
    else if (!isRooted) kept.push(part);
  }
  return kept;
}

function trimSlashes(path: string): string {
  let end = path.length;
  while (end > 0 && path[end - 1] === "/") end--;
  return path.slice(0, end);
}

function fileUrl(url: string | URL): URL {
  const parsed = new URL(url);
  if (parsed.protocol !== "file:") {
    throw new TypeError(`Cannot turn URL "${parsed}" into a path: it is no file: URL`);
  }
  return parsed;
}

/** Codes what URL.pathname would drop, or read as something else. */
function encodePath(path: string): string {
  return path
    .replace(/%/g, "%25")
    .replace(/\\/g, "%5C")
    .replace(/[\t\n\v\f\r ]/g, encodeURIComponent);
}

function notAbsolute(path: string): TypeError {
  return new TypeError(`Cannot turn path "${path}" into a URL: it is not absolute`);
}
