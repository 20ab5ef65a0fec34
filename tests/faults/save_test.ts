/**
 * A save that is cut off after any of its system calls, and one that meets a full disk at any of them.
 * Within this process: every point is tried, in the order in which a kernel would see the calls.
 */
import { assert, assertEquals, assertThrows } from "@std/assert";
import { join } from "@std/path";
import * as runner from "../../scripts/loop-runner.ts";
import * as status from "../../scripts/status.ts";
import { makeScratch } from "../helpers.ts";
import { Tally } from "./support.ts";

const OLD = { count: 1, text: "old" };
const NEW = { count: 2, text: "new ".repeat(2000) };
const textOf = (state: object): string => `${JSON.stringify(state, null, 2)}\n`;

/** What a save asks of the system. */
interface SystemCall {
  readonly name: "open" | "write" | "sync" | "rename" | "remove";
  readonly path: string;
}

/** How the system fails: at the n-th call alone, or at that and all after it, as when the power is cut. */
interface Failure {
  readonly at: number;
  readonly isLast: boolean;
  readonly error: Error;
}

/** Runs an action with its system calls noted, written piece by piece, and failing as told. */
function watch(
  action: () => void,
  { failure, pieceBytes = 5000 }: { failure?: Failure; pieceBytes?: number } = {},
): { calls: SystemCall[]; error: unknown } {
  const { openSync, renameSync, removeSync } = Deno;
  const { writeSync, syncSync } = Deno.FsFile.prototype;
  const calls: SystemCall[] = [];
  const paths = new WeakMap<Deno.FsFile, string>();
  const pass = (name: SystemCall["name"], path: string, atFailure = () => {}) => {
    calls.push({ name, path });
    if (failure === undefined || calls.length < failure.at) return;
    if (calls.length > failure.at && !failure.isLast) return;
    atFailure();
    throw failure.error;
  };
  Object.assign(Deno, {
    openSync(path: string, options: Deno.OpenOptions) {
      pass("open", path);
      const file = openSync(path, options);
      paths.set(file, path);
      return file;
    },
    renameSync(from: string, to: string) {
      pass("rename", to);
      renameSync(from, to);
    },
    removeSync(path: string) {
      pass("remove", path);
      removeSync(path);
    },
  });
  Deno.FsFile.prototype.writeSync = function (bytes) {
    const part = bytes.subarray(0, pieceBytes);
    pass("write", paths.get(this)!, () => void writeSync.call(this, part.subarray(0, 100)));
    return writeSync.call(this, part);
  };
  Deno.FsFile.prototype.syncSync = function () {
    pass("sync", paths.get(this)!);
    syncSync.call(this);
  };
  try {
    action();
    return { calls, error: null };
  } catch (error) {
    return { calls, error };
  } finally {
    Object.assign(Deno, { openSync, renameSync, removeSync });
    Object.assign(Deno.FsFile.prototype, { writeSync, syncSync });
  }
}

/** A folder with an old state and its copy. */
function makeOld(): { dir: string; path: string; [Symbol.dispose](): void } {
  const scratch = makeScratch();
  const path = join(scratch.project, ".state.loop");
  for (const each of [path, `${path}.bak`]) Deno.writeTextFileSync(each, textOf(OLD));
  return { dir: scratch.project, path, [Symbol.dispose]: () => scratch[Symbol.dispose]() };
}

const listNames = (dir: string): string[] =>
  [...Deno.readDirSync(dir)].map(({ name }) => name).filter((name) => name !== ".automaton").sort();

/** Each program's own copy of what saves. */
const PROGRAMS = { status, "loop-runner": runner };

function test(
  name: string,
  fn: (saves: Pick<typeof status, "saveState" | "writeFileAtomic">, program: string) => void,
): void {
  for (const [program, saves] of Object.entries(PROGRAMS)) {
    Deno.test(`${name} (${program})`, () => fn(saves, program));
  }
}

test(
  "a save that is cut off after any system call leaves a whole state, and a copy no older",
  ({ saveState }, program) => {
    const tally = new Tally(`a save cut off (${program})`);
    const whole = [textOf(OLD), textOf(NEW)];
    for (let [at, isOver] = [1, false]; !isOver; at++) {
      using old = makeOld();
      const error = new Error("the power is cut");
      const { calls, error: met } = watch(
        () => saveState(old.path, NEW),
        { failure: { at, isLast: true, error } },
      );
      isOver = calls.length < at;
      tally.tried++;
      const [state, copy] = [old.path, `${old.path}.bak`].map((path) =>
        Deno.readTextFileSync(path)
      );
      for (const text of [state!, copy!]) {
        tally.check(whole.includes(text), "states lost", `call ${at} left ${text.slice(0, 40)}`);
      }
      tally.check(
        copy === whole[1] || state === whole[0],
        "states lost",
        `call ${at}: an older copy`,
      );
      if (isOver) assertEquals([met, state, copy], [null, whole[1], whole[1]]);
    }
    assert(tally.tried > 10, `${tally.tried} calls`);
    tally.close();
  },
);

test(
  "a save that one system call fails says so, changes nothing half, and leaves no litter",
  ({ saveState }, program) => {
    const tally = new Tally(`a save that fails (${program})`);
    for (let [at, isOver] = [1, false]; !isOver; at++) {
      using old = makeOld();
      const error = new Error("no space left on device");
      const { calls, error: met } = watch(
        () => saveState(old.path, NEW),
        { failure: { at, isLast: false, error } },
      );
      const failed = calls[at - 1];
      isOver = failed === undefined;
      tally.tried++;
      const isFolderSync = failed?.path === old.dir && failed.name === "sync";
      tally.check(met === (isOver || isFolderSync ? null : error), "other", `call ${at}: ${met}`);
      tally.check(
        listNames(old.dir).join() === ".state.loop,.state.loop.bak",
        "other",
        () => `call ${at} left ${listNames(old.dir)}`,
      );
      const [state, copy] = [old.path, `${old.path}.bak`].map((path) =>
        Deno.readTextFileSync(path)
      );
      const isBeforeRenames = !calls.slice(0, at).some(({ name }) => name === "rename");
      const expected = textOf(isBeforeRenames ? OLD : NEW);
      tally.check(!isBeforeRenames || state === expected, "states lost", `call ${at}: state`);
      tally.check(!isBeforeRenames || copy === expected, "states lost", `call ${at}: copy`);
    }
    tally.close();
  },
);

test("a save syncs each file after its last byte and before its name, and the folder last", ({ saveState }) => {
  for (const pieceBytes of [1, 4096, 1e9]) {
    using old = makeOld();
    const { calls, error } = watch(() => saveState(old.path, NEW), { pieceBytes });
    assertEquals(error, null);
    assertEquals(Deno.readTextFileSync(old.path), textOf(NEW));
    const plain = calls.filter(({ name }, index) =>
      name !== "write" || calls[index + 1]?.name !== "write"
    );
    const names = plain.map(({ name, path }) =>
      `${name} ${path === old.dir ? "folder" : ""}`.trim()
    );
    assertEquals(names, [
      ..."open,write,sync,open,write,sync,rename,rename".split(","),
      "open folder",
      "sync folder",
    ]);
    assertEquals(plain.filter(({ name }) => name === "rename").map(({ path }) => path), [
      `${old.path}.bak`,
      old.path,
    ]);
    const temporaries = plain.slice(0, 6).map(({ path }) => path);
    assertEquals(temporaries.every((path) => path.startsWith(`${old.dir}/.`)), true);
  }
});

test("a file of a save that was cut off does not get into the next one", ({ saveState }) => {
  using old = makeOld();
  const error = new Error("the power is cut");
  watch(() => saveState(old.path, { ...NEW, more: "x".repeat(50_000) }), {
    failure: { at: 8, isLast: true, error },
  });
  assert(listNames(old.dir).length > 2, "there are temporary files");
  saveState(old.path, NEW);
  for (const path of [old.path, `${old.path}.bak`]) {
    assertEquals(Deno.readTextFileSync(path), textOf(NEW));
  }
  assertEquals(listNames(old.dir), [".state.loop", ".state.loop.bak"]);
});

test("a file is replaced whole, or made, with the rights of others left to their umask", ({ writeFileAtomic }) => {
  using old = makeOld();
  const path = join(old.dir, "new.json");
  writeFileAtomic(path, "ä\n");
  assertEquals(Deno.readTextFileSync(path), "ä\n");
  writeFileAtomic(path, "");
  assertEquals(Deno.readTextFileSync(path), "");
  assertThrows(() => writeFileAtomic(join(old.dir, "none", "x"), "x"), Deno.errors.NotFound);
});
