/**
 * Stand-in for `@std/fs` 1.0.24: `ensureDirSync`, `existsSync`, `copySync`.
 *
 * @module
 */

import { basename, join, relative, resolve } from "@std/path";

/**
 * Makes sure that a folder exists, with those above it.
 *
 * @param dir Path of the folder.
 * @throws {Error} If something else has that name.
 */
export function ensureDirSync(dir: string): void {
  if (existsSync(dir, { isDirectory: true })) return;
  if (existsSync(dir)) {
    throw new Error(`Cannot ensure folder "${dir}": there is something else of that name`);
  }
  Deno.mkdirSync(dir, { recursive: true });
}

/**
 * Tells whether a path leads to something. Links are followed.
 *
 * @param path Path to look at.
 * @param options What it must be.
 * @returns False also where a folder on the way is missing or is a file.
 */
export function existsSync(
  path: string,
  options: { isDirectory?: boolean; isFile?: boolean } = {},
): boolean {
  let info: Deno.FileInfo;
  try {
    info = Deno.statSync(path);
  } catch (error) {
    if (error instanceof Deno.errors.NotFound || error instanceof Deno.errors.NotADirectory) {
      return false;
    }
    throw error;
  }
  return (!options.isDirectory || info.isDirectory) && (!options.isFile || info.isFile);
}

/**
 * Copies a file, a link or a folder with all it holds. Links are copied as links.
 *
 * @param src What to copy.
 * @param dest The name of the copy.
 * @param options With `overwrite`, what is there already is replaced, or merged with where it is a folder.
 * @throws {Deno.errors.AlreadyExists} If `dest` exists and `overwrite` is not set.
 * @throws {Error} If `dest` is `src`, or a folder below it.
 */
export function copySync(src: string, dest: string, options: { overwrite?: boolean } = {}): void {
  const from = resolve(src);
  const to = resolve(dest);
  if (from === to) throw new Error(`Cannot copy "${src}": source and copy are the same`);
  const info = Deno.lstatSync(from);
  if (info.isDirectory && !relative(from, to).startsWith("..")) {
    throw new Error(`Cannot copy folder "${src}": the copy "${dest}" lies inside it`);
  }
  if (!options.overwrite && linkExists(to)) {
    throw new Deno.errors.AlreadyExists(`Cannot copy to "${dest}": it exists already`);
  }
  copyEntry(from, to, info);
}

function copyEntry(from: string, to: string, info: Deno.FileInfo): void {
  if (info.isSymlink) {
    if (linkExists(to)) Deno.removeSync(to);
    Deno.symlinkSync(Deno.readLinkSync(from), to);
  } else if (info.isDirectory) {
    ensureDirSync(to);
    if (info.mode !== null) Deno.chmodSync(to, info.mode & 0o7777);
    for (const { name } of Deno.readDirSync(from)) {
      const entry = join(from, basename(name));
      copyEntry(entry, join(to, name), Deno.lstatSync(entry));
    }
  } else {
    Deno.copyFileSync(from, to);
  }
}

function linkExists(path: string): boolean {
  try {
    Deno.lstatSync(path);
    return true;
  } catch (error) {
    if (error instanceof Deno.errors.NotFound || error instanceof Deno.errors.NotADirectory) {
      return false;
    }
    throw error;
  }
}
