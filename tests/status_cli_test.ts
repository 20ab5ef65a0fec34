/** status: its command line, help, version and JSON. */
import { assert, assertEquals, assertStringIncludes } from "@std/assert";
import { existsSync } from "@std/fs";
import { join } from "@std/path";
import { COMMANDS, OPTIONS } from "../scripts/status.ts";
import { makeScratch, ROOT, snapshot, writeFile, writeLoop, writeTask } from "./helpers.ts";
import { accept, misuse, refuse, status } from "./status_support.ts";

Deno.test("--help lists every command and every option of the tables, and nothing else", async () => {
  using scratch = makeScratch();
  const { code, stdout, stderr } = await status(scratch, ["--help"]);
  assertEquals([code, stderr], [0, ""]);
  const listed = [...stdout.matchAll(/^ {2}--([a-z-]+)( [A-Z]+)? {2,}(\S.*)$/gm)]
    .map(([, name, value, help]) => [name, value?.trim(), help]);
  const expected = [
    ...COMMANDS.filter(({ group }) => group === "Tasks"),
    ...COMMANDS.filter(({ group }) => group === "Loops"),
    ...OPTIONS,
  ].map(({ name, value, help }) => [name, value, help]);
  assertEquals(listed, expected);
});

Deno.test("the README lists the commands of --help, and uses no others", () => {
  const readme = Deno.readTextFileSync(join(ROOT, "README.md"));
  const flags = (text: string) =>
    [...text.matchAll(/--([a-z-]+)/g)].map(([, name]) => name!).sort();
  for (const group of ["Tasks", "Loops"]) {
    const own = COMMANDS.filter((command) => command.group === group).map(({ name }) => name);
    const listed = readme.split("\n\n")
      .find((part) => part.startsWith(`\`status\`, ${group.toLowerCase()}:`));
    assertEquals(flags(listed ?? "no such list"), own.sort());
  }
  const known = [...COMMANDS, ...OPTIONS].map(({ name }) => name);
  for (const [call] of readme.matchAll(/\bstatus --[^`\n]*/g)) {
    for (const flag of flags(call)) assert(known.includes(flag), `README.md: ${call}`);
  }
});

Deno.test("every command says what it takes, and all that it takes are options", () => {
  const known = new Set([...OPTIONS, ...COMMANDS].map(({ name }) => name));
  for (const { name, takes, needs = [] } of COMMANDS) {
    for (const option of takes) assert(known.has(option), `${name} takes ${option}`);
    for (const option of needs) assert(takes.includes(option), `${name} needs ${option}`);
  }
});

Deno.test("--version tells the version of config.md, in words and as JSON", async () => {
  using scratch = makeScratch();
  const framework = join(scratch.dir, "frame work");
  writeFile(join(framework, "config.md"), "# Settings\n\nversion: 9.8.7\n");
  const env = { AUTOMATON_HOME: framework };
  assertEquals((await status(scratch, ["--version"], { env })).stdout, "status 9.8.7\n");
  assertEquals(await accept(scratch, ["--version"], { env }), {
    schema_version: 1,
    version: "9.8.7",
  });
  const own = /^version:\s*(\S+)/m.exec(Deno.readTextFileSync(join(ROOT, "config.md")))?.[1];
  assertEquals((await accept(scratch, ["--version"])).version, own);
});

Deno.test("a command line that cannot be understood is a usage error of one line", async (t) => {
  using scratch = makeScratch();
  writeTask(scratch, "one");
  writeLoop(scratch, "night");
  const before = snapshot(scratch.project);
  const cases: readonly (readonly [name: string, args: string[], words: RegExp])[] = [
    ["no command", [], /without a command: see --help/],
    ["only options", ["--json"], /without a command/],
    ["an unknown flag", ["--loop-lisst"], /"--loop-lisst".*did you mean --loop-list\?/],
    ["an unknown flag with a value", ["--tsak=x"], /"--tsak".*did you mean --task\?/],
    ["a flag like none", ["--xylophone-zzzz"], /"--xylophone-zzzz": unknown \(see --help\)/],
    ["a short flag", ["-l"], /"-l"/],
    ["an argument without a flag", ["audit"], /"audit": every value follows a flag/],
    ["words after --", ["--audit", "--", "x"], /"x": every value follows a flag/],
    ["a missing value", ["--task"], /"--task": its value is missing/],
    ["an empty value", ["--task="], /"--task": its value is missing/],
    ["a flag where a value belongs", ["--task", "--json"], /"--task": its value is missing/],
    ["a value where none belongs", ["--audit=yes"], /"--audit": it takes no value/],
    ["the name of an object's own key", ["--constructor=x"], /"--constructor": unknown/],
    ["its prototype", ["--__proto__=x"], /"--__proto__": unknown/],
    ["two commands", ["--audit", "--loop-list"], /"--audit" and "--loop-list" at once/],
    ["an option of another command", ["--audit", "--force"], /"--force" with "--audit"/],
    ["a task where none goes", ["--loop-list", "--task=one"], /"--task" with "--loop-list"/],
    ["a number that is none", ["--loop-log=night", "--lines=ten"], /"--lines": "ten" is not a w/],
    ["a number too small", ["--loop-log=night", "--lines=0"], /from 1 to 1000000/],
    ["a fraction", ["--check-gate=night", "--lock-timeout=1.5"], /"1.5"/],
    ["a wait in words", ["--check-gate=night", "--dry-run", "--lock-timeout=long"], /"long"/],
    ["a negative number", ["--audit", "--stalled-days=-1"], /"--stalled-days": "-1"/],
    ["a step without its task", ["--transition=design"], /"--task" is missing/],
    ["a claim without a session", ["--claim", "--task=one"], /"--session" is missing/],
    ["a loop without a template", ["--create-loop=x"], /"--from-template" is missing/],
    ["a halt without a reason", ["--halt-loop=night"], /"--reason" is missing/],
    ["an approval of nothing", ["--approve"], /give either --task or --loop/],
    ["an approval of two", ["--approve", "--task=one", "--loop=night"], /either --task or --loop/],
    ["a scope of nothing", ["--scope-check"], /give --task or --loop/],
    ["a worktree of no loop", ["--can-edit", "--loop-worktree"], /"--loop-worktree" without/],
    ["an unknown phase", ["--transition=desing", "--task=one"], /"desing".*did you mean design\?/],
    ["a phase nothing starts in", ["--create-task=x", "--phase=complete"], /"complete".*none of/],
    ["a halt by a free word", ["--halt-loop=night", "--reason=tired"], /"tired".*drift_detected/],
    ["two lines of a title", ["--create-task=x", "--title=a\nb"], /"--title": it must be one line/],
    ["an escape in a reason", [
      "--transition=human_intervention",
      "--task=one",
      "--reason=\u001b[2J",
    ], /"--reason": it must be one line/],
    ["a page of a session", ["--claim", "--task=one", `--session=${"x".repeat(2001)}`], /2000/],
  ];
  for (const [name, args, words] of cases) {
    await t.step(name, () => misuse(scratch, args, words));
  }
  await t.step("nothing has changed", () => assertEquals(snapshot(scratch.project), before));
});

Deno.test("a name that could lead out of its folder is refused before a path is built", async (t) => {
  using scratch = makeScratch();
  const before = snapshot(scratch.dir);
  const names = ["..", "../x", "a/b", "/etc", "A", "-a", "a_b", "a b", "ä", ".a", "a".repeat(64)];
  const commands = [
    ["--create-task"],
    ["--task"],
    ["--transition=design", "--task"],
    ["--approve", "--loop"],
    ["--remove-loop"],
    ["--create-loop=ok", "--from-template"],
    ["--check-gate"],
    ["--loop-log"],
  ];
  for (const [index, name] of names.entries()) {
    const command = commands[index % commands.length]!;
    await t.step(`${command.at(-1)} ${name}`, async () => {
      const args = [...command.slice(0, -1), `${command.at(-1)}=${name}`];
      await misuse(scratch, args, /name ".*": it must be 1 to 63 of a-z, 0-9 and -/);
    });
  }
  assertEquals(snapshot(scratch.dir), before);
});

Deno.test("--flag value and --flag=value are the same, in any order", async () => {
  using scratch = makeScratch();
  writeTask(scratch, "one");
  const { stdout } = await status(scratch, ["--task", "one", "--json"]);
  assertEquals((await status(scratch, ["--json", "--task=one"])).stdout, stdout);
});

Deno.test("every command answers --json with one line, also when it fails", async (t) => {
  using scratch = makeScratch();
  writeTask(scratch, "one", "spec");
  writeFile(join(scratch.project, ".automaton/tasks/one/SPEC.md"), "x");
  writeTask(scratch, "two");
  const lines: readonly (readonly string[])[] = [
    ["--help"],
    ["--create-task=three"],
    ["--task=one"],
    ["--approve", "--task=one"],
    ["--transition=implement", "--task=one"],
    ["--claim", "--task=one", "--session=me"],
    ["--release", "--task=one"],
    ["--can-edit", "--task=one", "--file=a.ts"],
    ["--scope-check", "--task=one"],
    ["--audit"],
    ["--create-loop=night", "--from-template=ci-triage"],
    ["--check-gate=night"],
    ["--can-continue=night"],
    ["--claim-loop-task=night", "--task=two"],
    ["--loop-list"],
    ["--loop-log=night"],
    ["--install-schedule=night", "--scheduler=cron", "--dry-run"],
    ["--uninstall-schedule=night"],
    ["--doctor"],
    ["--pause-loop=night"],
    ["--resume-loop=night"],
    ["--halt-loop=night", "--reason=human_intervention"],
    ["--approve", "--loop=night"],
    ["--remove-loop=night"],
  ];
  for (const args of lines.filter(([flag]) => flag !== "--scope-check")) {
    await t.step(args.join(" "), async () => {
      await accept(scratch, args);
    });
  }
  const flags = lines.map(([flag]) => flag!.split("=")[0]!.slice(2));
  assertEquals(COMMANDS.filter(({ name }) => !flags.includes(name)).map(({ name }) => name), []);
  await t.step("a usage error", async () => {
    const { code, stdout } = await status(scratch, ["--audit", "--bogus", "--json"]);
    const { error, ...rest } = JSON.parse(stdout);
    assertEquals([code, rest], [2, { schema_version: 1, ok: false, hint: null }]);
    assertStringIncludes(error, '"--bogus"');
  });
  await t.step("a refusal", async () => {
    await refuse(scratch, ["--task=nobody"], /"nobody": there is none/);
  });
});

Deno.test("the project is the flag, else AUTOMATON_PROJECT, else the nearest folder above", async (t) => {
  using scratch = makeScratch();
  writeTask(scratch, "here");
  const inner = join(scratch.project, "a", "b");
  const other = join(scratch.dir, "other");
  Deno.mkdirSync(inner, { recursive: true });
  Deno.mkdirSync(join(other, ".automaton", "tasks"), { recursive: true });
  const show = ["--task=here"];
  await t.step(
    "from a folder below it",
    async () => void await accept(scratch, show, { cwd: inner }),
  );
  await t.step(
    "from the environment",
    async () =>
      void await accept(scratch, show, { cwd: other, env: { AUTOMATON_PROJECT: scratch.project } }),
  );
  await t.step(
    "the flag wins",
    () =>
      refuse(scratch, [...show, `--project=${other}`], /there is none in/, {
        env: { AUTOMATON_PROJECT: scratch.project },
      }),
  );
  await t.step(
    "none above",
    () => refuse(scratch, show, /Cannot find a project from/, { cwd: scratch.dir }),
  );
  await t.step(
    "no such folder",
    () => refuse(scratch, [...show, "--project=/nowhere"], /"\/nowhere": no such folder/),
  );
  await t.step(
    "a folder that is no project",
    () => refuse(scratch, [...show, `--project=${scratch.home}`], /holds no \.automaton folder/),
  );
  await t.step(
    "a command that makes one does not make the folder itself",
    () => refuse(scratch, ["--create-task=x", "--project=nowhere"], /no such folder/),
  );
  await t.step("but makes what belongs into a folder that is named", async () => {
    await accept(scratch, ["--create-task=x", `--project=${scratch.home}`]);
    assert(existsSync(join(scratch.home, ".automaton/tasks/x/.state")));
  });
});

Deno.test("variables of git for another repository have no effect", async () => {
  using scratch = makeScratch();
  writeLoop(scratch, "night", { blast_radius: { file_scope: ["src"] } }, {
    worktree_path: scratch.project,
  });
  const env = { GIT_DIR: "/nowhere", GIT_WORK_TREE: "/nowhere", GIT_INDEX_FILE: "/nowhere" };
  assertEquals((await accept(scratch, ["--check-gate=night"], { env })).ok, true);
});

Deno.test("a reader that goes away is no failure of the audit", async () => {
  using scratch = makeScratch();
  for (let index = 0; index < 3; index++) {
    writeFile(join(scratch.project, `.automaton/tasks/t${index}/note`), "x");
  }
  const { stderr } = await new Deno.Command("sh", {
    args: ["-c", '"$@" | head -c 1 >/dev/null', "sh", ...argvOfAudit(scratch.project)],
    clearEnv: true,
    env: scratch.env,
  }).output();
  assert(!new TextDecoder().decode(stderr).includes("Cannot go on"));
});

function argvOfAudit(project: string): string[] {
  const script = join(ROOT, "scripts", "status.ts");
  const start = [Deno.execPath(), "run", "-q", "--no-prompt", "-P=status", script];
  return [...start, "--audit", `--project=${project}`];
}
