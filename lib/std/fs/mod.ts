/**
 * Stand-in for `@std/fs` 1.0.24: `ensureDirSync`, `existsSync`, `copySync`.
 *
 * @module
 */

import { join, relative, resolve, SEPARATOR } from "@std/path";

/**
 * Makes sure that a folder exists, with those above it.
 *
 * @param dir Path of the folder.
 * @throws {Error} If something else has that name.
 */
export function ensureDirSync(dir: string): void {
  // Made first and looked at afterwards: somebody else may make the same folder at the same time.
  try {
    Deno.mkdirSync(dir, { recursive: true });
  } catch (error) {
    if (existsSync(dir, { isDirectory: true })) return;
    if (!(error instanceof Deno.errors.AlreadyExists)) throw error;
    throw new Error(`Cannot make folder "${dir}": something else has that name`);
  }
}

/**
 * Tells whether a path leads to something. Links are followed.
 *
 * @param path Path to look at.
 * @param options What it must be.
 * @returns True also for what is there but may not be looked at.
 * @throws {Deno.errors.NotADirectory} If a part of the way is a file.
 */
export function existsSync(
  path: string,
  options: { isDirectory?: boolean; isFile?: boolean } = {},
): boolean {
  try {
    const info = Deno.statSync(path);
    return (!options.isDirectory || info.isDirectory) && (!options.isFile || info.isFile);
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return false;
    if (error instanceof Deno.errors.PermissionDenied) return true;
    throw error;
  }
}

/**
 * Copies a file, a link or a folder with all it holds. Links are copied as links.
 *
 * @param src What to copy.
 * @param dest Name of the copy, not of the folder that is to hold it.
 * @param options With `overwrite`, files that are there already are replaced and folders are merged.
 * @throws {Deno.errors.AlreadyExists} If `dest` exists and `overwrite` is not set.
 * @throws {Error} If `dest` is `src` or lies inside it, or if a folder would replace a file.
 */
export function copySync(src: string, dest: string, options: { overwrite?: boolean } = {}): void {
  const from = resolve(src);
  const to = resolve(dest);
  if (from === to) throw new Error(`Cannot copy "${src}": the copy would have the same name`);
  if (Deno.lstatSync(from).isDirectory && isInside(from, to)) {
    throw new Error(`Cannot copy folder "${src}": the copy "${dest}" would lie inside it`);
  }
  copyEntry(from, to, options.overwrite ?? false);
}

function copyEntry(from: string, to: string, overwrite: boolean): void {
  const source = Deno.lstatSync(from);
  const target = lstatOrNull(to);
  if (target && source.isDirectory && !target.isDirectory) {
    throw new Error(`Cannot copy folder "${from}": "${to}" is no folder`);
  }
  if (target && !overwrite) {
    throw new Deno.errors.AlreadyExists(`Cannot copy to "${to}": it exists already`);
  }
  if (source.isSymlink) {
    Deno.symlinkSync(Deno.readLinkSync(from), to);
  } else if (source.isFile) {
    Deno.copyFileSync(from, to);
  } else if (source.isDirectory) {
    ensureDirSync(to);
    for (const { name } of Deno.readDirSync(from)) {
      copyEntry(join(from, name), join(to, name), overwrite);
    }
  }
}

function isInside(folder: string, path: string): boolean {
  const [first] = relative(folder, path).split(SEPARATOR);
  return first !== "..";
}

function lstatOrNull(path: string): Deno.FileInfo | null {
  try {
    return Deno.lstatSync(path);
  } catch (error) {
    if (error instanceof Deno.errors.NotFound) return null;
    throw error;
  }
}
