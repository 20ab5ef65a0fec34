/** status: paths of every kind, folders that cannot be written, and disks that are full. */
import { assert, assertEquals, assertMatch, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import {
  git,
  loopDir,
  makeRepository,
  makeScratch,
  readJson,
  runProgram,
  type Scratch,
  snapshot,
  taskDir,
  writeFile,
  writeLoop,
  writeTask,
} from "./helpers.ts";
import { accept, becomeNobody, refuse, status } from "./status_support.ts";

const PLACES = [
  "with a space",
  'it\'s "quoted"',
  "100% of $HOME",
  "-leading-dash",
  "ünï☃ 雪",
  "back\\slash",
  "new\nline",
  "semi;colon & `tick` $(touch x) #",
  "*?[a]{b}",
  "~",
];

for (const place of PLACES) {
  Deno.test(`a project in a folder ${JSON.stringify(place)} works like any other`, async () => {
    using scratch = makeScratch(place);
    makeRepository(scratch, scratch.project, {
      "src/a.ts": "a\n",
      "b.ts": "b\n",
      ".gitignore": ".automaton/\n",
    });
    await accept(scratch, ["--create-task=one", "--phase=implement"]);
    await accept(scratch, ["--create-loop=night", "--from-template=ci-triage", "--task=one"]);
    const worktree = join(loopDir(scratch, "night"), "worktree");
    git(scratch, scratch.project, "worktree", "add", "--quiet", worktree, "-b", "loop/night");
    const state = readJson(join(loopDir(scratch, "night"), ".state.loop"));
    writeLoop(scratch, "night", { blast_radius: { file_scope: ["src"] } }, {
      ...state,
      worktree_path: worktree,
    });
    writeFile(join(worktree, "src/a.ts"), "changed\n");
    assertEquals((await accept(scratch, ["--check-gate=night"])).ok, true);
    const edit = ["--can-edit", "--loop=night", "--loop-worktree"];
    await accept(scratch, [...edit, `--file=${join(worktree, "src/a.ts")}`]);
    await accept(scratch, [...edit, "--file=src/a.ts"]);
    writeFile(join(worktree, "b.ts"), "changed\n");
    const { out_of_scope_files } = await accept(scratch, ["--check-gate=night"]);
    assertEquals(out_of_scope_files, ["b.ts"]);
    await accept(scratch, ["--approve", "--loop=night"]);
    await accept(scratch, ["--remove-loop=night", "--force"]);
    assert(!existsSync(worktree));
    // Named by a relative path from above, and by the environment.
    const relative = [`--project=${place}`, "--task=one"];
    assertEquals((await accept(scratch, relative, { cwd: scratch.dir })).phase, "implement");
    const env = { AUTOMATON_PROJECT: `./${place}` };
    await accept(scratch, ["--task=one"], { cwd: scratch.dir, env });
    // Nothing of the names was taken for a command or a pattern.
    assertEquals([...Deno.readDirSync(scratch.dir)].length, 4);
  });
}

Deno.test("texts of every kind come back as they were given", async () => {
  using scratch = makeScratch();
  const texts = [
    '"quoted"',
    "it's",
    "50% $HOME `x`",
    "-dash",
    "ünï☃",
    "a\\nb",
    "=",
    "{task_brief}",
  ];
  for (const [index, text] of texts.entries()) {
    const [task, loop] = [`t${index}`, `l${index}`];
    await accept(scratch, [`--create-task=${task}`, `--title=${text}`]);
    await accept(scratch, [
      `--task=${task}`,
      "--transition=human_intervention",
      `--reason=${text}`,
    ]);
    await accept(scratch, [`--task=${task}`, "--claim", `--session=${text}`]);
    const { title, history, claimed_by } = await accept(scratch, [`--task=${task}`]);
    const { reason } = (history as Record<string, unknown>[]).at(-1)!;
    assertEquals([title, reason, claimed_by], [text, text, text]);
    writeLoop(scratch, loop);
    const halt = [`--halt-loop=${loop}`, "--reason=human_intervention", `--detail=${text}`];
    await accept(scratch, halt);
    const { lines } = await accept(scratch, [`--loop-log=${loop}`]);
    assertEquals((lines as Record<string, unknown>[])[0]!.detail, text);
  }
});

Deno.test("the longest names work, and together they fit", async () => {
  using scratch = makeScratch();
  const [task, loop] = ["t".repeat(63), "0".repeat(63)];
  await accept(scratch, [`--create-task=${task}`]);
  await accept(scratch, [`--create-loop=${loop}`, "--from-template=demo", `--task=${task}`]);
  assertEquals((await accept(scratch, [`--check-gate=${loop}`])).ok, true);
});

Deno.test("a task named complete is refused: finished tasks live there", async () => {
  using scratch = makeScratch();
  const { code, stderr } = await status(scratch, ["--create-task=complete"]);
  assertEquals(code, 2);
  assertMatch(stderr, /"complete": finished tasks live there/);
  writeTask(scratch, "one", "complete");
  await refuse(scratch, ["--task=complete"], /"complete": there is none/);
});

/** Commands that write, with what they would need. */
const WRITING: readonly (readonly string[])[] = [
  ["--create-task=new"],
  ["--transition=human_intervention", "--task=one", "--reason=x"],
  ["--claim", "--task=one", "--session=me"],
  ["--create-loop=second", "--from-template=demo"],
  ["--check-gate=night"],
  ["--pause-loop=night"],
  ["--halt-loop=night", "--reason=human_intervention"],
  ["--remove-loop=night"],
];

/** A project in which somebody else may only read. */
function makeReadOnly(scratch: Scratch): void {
  writeTask(scratch, "one", "implement");
  writeLoop(scratch, "night", {}, { iteration_count: 99 });
  for (const name of ["tasks/one", "tasks", "loops/night", "loops", "."]) {
    Deno.chmodSync(join(scratch.project, ".automaton", name), 0o555);
  }
  for (const file of ["tasks/one/.state", "loops/night/.state.loop", "loops/night/loop.json"]) {
    Deno.chmodSync(join(scratch.project, ".automaton", file), 0o444);
  }
}

Deno.test("in a folder that is read-only reading works and writing fails without a trace", async (t) => {
  using scratch = makeScratch("a project");
  makeReadOnly(scratch);
  const prefix = becomeNobody(scratch);
  const before = snapshot(scratch.dir);
  for (const args of [["--task=one"], ["--audit"], ["--loop-list"], ["--can-continue=night"]]) {
    await t.step(args[0]!, async () => {
      const { code, stderr } = await status(scratch, [...args, "--json"], { prefix });
      assertEquals([code, stderr], [0, ""]);
    });
  }
  await t.step("--check-gate with --dry-run", async () => {
    const args = ["--check-gate=night", "--dry-run", "--json"];
    const { stdout } = await status(scratch, args, { prefix });
    assertEquals(JSON.parse(stdout).reason, "halted:iterations_exhausted");
  });
  for (const args of WRITING) {
    await t.step(
      args[0]!,
      () =>
        refuse(
          scratch,
          args,
          /Cannot [a-z]+ "\/.*": (Permission denied|Read-only).* hint: check who may/,
          {
            prefix,
          },
        ),
    );
  }
  assertEquals(snapshot(scratch.dir), before);
});

/** Mounts a disk of 1 MiB; false where that is not allowed. */
function mountSmallDisk(path: string): boolean {
  if (Deno.build.os !== "linux" || Deno.uid() !== 0) return false;
  Deno.mkdirSync(path, { recursive: true });
  const args = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", path];
  return new Deno.Command("mount", { args, stderr: "null" }).outputSync().success;
}

function unmount(path: string): void {
  new Deno.Command("umount", { args: [path] }).outputSync();
}

function canMount(): boolean {
  const dir = Deno.makeTempDirSync();
  const isMounted = mountSmallDisk(dir);
  if (isMounted) unmount(dir);
  Deno.removeSync(dir);
  return isMounted;
}

Deno.test("a save that the disk has no room for leaves the old state, and says so", {
  ignore: !canMount(),
}, async (t) => {
  using scratch = makeScratch();
  const disk = join(scratch.dir, "disk");
  assert(mountSmallDisk(disk));
  try {
    const automaton = join(scratch.project, ".automaton");
    Deno.removeSync(automaton);
    Deno.symlinkSync(disk, automaton);
    writeTask(scratch, "one", "implement", { ballast: "x".repeat(280_000) });
    writeLoop(scratch, "night", {}, { ballast: "x".repeat(280_000) });
    const before = snapshot(disk);
    // Room for the first of the two files of a save, and not for the second.
    await t.step(
      "a task",
      () =>
        refuse(scratch, ["--claim", "--task=one", "--session=me"], /No space left .* hint: check/),
    );
    await t.step(
      "a loop",
      () => refuse(scratch, ["--halt-loop=night", "--reason=human_intervention"], /No space left/),
    );
    const locks = ["tasks/one/.state.lock", "loops/night/.state.lock"];
    assertEquals(snapshot(disk, locks), before);
  } finally {
    unmount(disk);
  }
});

Deno.test("a save that fails half-way leaves the old state and no litter", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one", "implement", { ballast: "x".repeat(400_000) });
  const before = snapshot(dir);
  const limit = 'trap "" XFSZ; ulimit -f 200; exec "$@"';
  const prefix = ["sh", "-c", limit, "sh"];
  await refuse(scratch, ["--claim", "--task=one", "--session=me"], /File too large .* hint: /, {
    prefix,
  });
  assertEquals(snapshot(dir, [".state.lock"]), before);
});

Deno.test("a project whose .automaton is a file, or a link to nothing, is none", async () => {
  using scratch = makeScratch();
  const automaton = join(scratch.project, ".automaton");
  Deno.removeSync(automaton);
  writeFile(automaton, "x");
  const project = `--project=${scratch.project}`;
  await refuse(scratch, ["--audit", project], /holds no \.automaton folder/);
  await refuse(scratch, ["--create-task=x", project], /Cannot .*hint: /);
  assertEquals(Deno.readTextFileSync(automaton), "x");
  Deno.removeSync(automaton);
  Deno.symlinkSync("/nowhere/at/all", automaton);
  await refuse(scratch, ["--audit", project], /holds no \.automaton folder/);
});

Deno.test("files where folders belong, and folders where files belong, are told", async (t) => {
  using scratch = makeScratch();
  await t.step("a task that is a file", async () => {
    writeFile(taskDir(scratch, "file"), "x");
    await refuse(scratch, ["--task=file"], /Cannot open task "file": there is none/);
    await refuse(scratch, ["--create-task=file"], /Cannot create .*file": .*hint: /);
  });
  await t.step("a state that is a folder", async () => {
    Deno.mkdirSync(join(taskDir(scratch, "odd"), ".state"), { recursive: true });
    await refuse(scratch, ["--task=odd"], /Cannot .*hint: /);
    assertEquals(((await accept(scratch, ["--audit"])).violations as unknown[]).length, 1);
  });
  await t.step("a loop.json that is a folder", async () => {
    const dir = writeLoop(scratch, "night");
    Deno.removeSync(join(dir, "loop.json"));
    Deno.mkdirSync(join(dir, "loop.json"));
    await refuse(scratch, ["--check-gate=night"], /Cannot .*hint: /);
  });
  await t.step("a loops folder that is a file", async () => {
    Deno.removeSync(join(scratch.project, ".automaton/loops"), { recursive: true });
    writeFile(join(scratch.project, ".automaton/loops"), "x");
    await refuse(scratch, ["--create-loop=a", "--from-template=demo"], /Cannot .*hint: /);
    await refuse(scratch, ["--loop-list"], /Cannot .*hint: /);
  });
});

Deno.test("a pipe in a state file's place holds nobody up", async () => {
  using scratch = makeScratch();
  const dir = writeTask(scratch, "one");
  Deno.removeSync(join(dir, ".state"));
  assert(new Deno.Command("mkfifo", { args: [join(dir, ".state")] }).outputSync().success);
  await refuse(scratch, ["--task=one"], /Cannot /, { timeoutMs: 20_000 });
  await accept(scratch, ["--audit"], { timeoutMs: 20_000 });
});

Deno.test("a checkout of Automaton named .automaton in a home folder makes no project of that folder", async () => {
  using scratch = makeScratch();
  const inner = join(scratch.home, "work", "inner");
  Deno.mkdirSync(inner, { recursive: true });
  Deno.mkdirSync(join(scratch.home, ".automaton", "templates", "loops"), { recursive: true });
  const lost = await runProgram(scratch, "status", ["--loop-list"], { cwd: inner });
  assertEquals(lost.code, 1);
  assertStringIncludes(lost.stderr, "no folder above it holds .automaton");
  const named = await runProgram(scratch, "status", [
    "--create-task=t1",
    `--project=${scratch.home}`,
  ]);
  assertEquals(named.code, 1);
  assertStringIncludes(named.stderr, "its .automaton is a checkout of Automaton");
  assertEquals([...Deno.readDirSync(join(scratch.home, ".automaton"))].length, 1);
  const own = join(scratch.home, ".automaton");
  assertEquals(
    (await runProgram(scratch, "status", ["--create-task=t1", `--project=${own}`])).code,
    0,
  );
});
