/** Words that end up in sh, cron, systemd, XML, YAML and on Windows come out of them as they were. */
import { assert, assertEquals, assertNotEquals, assertThrows } from "@std/assert";
import {
  checkUnitValue,
  cleanPath,
  encodeUtf16,
  escapeXml,
  quoteCronWord,
  quoteShWord,
  quoteSystemdArgument,
  quoteWindowsArgument,
  quoteYaml,
} from "../scripts/status.ts";
import { fc, THOROUGHNESS } from "./deps.ts";
import { DOMParser, nastyPath, nastyWord, parseYaml } from "./schedule_support.ts";

/** The words that a line of sh passes to a program. */
function readWithSh(line: string): string[] {
  const { code, stdout } = new Deno.Command("sh", {
    args: ["-c", `printf '%s\\0' ${line}`],
    env: { x: "expanded", HOME: "/expanded" },
  }).outputSync();
  assertEquals(code, 0, line);
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(stdout).split("\0").slice(0, -1);
}

const words = fc.array(nastyWord, { minLength: 1, maxLength: 20 });

Deno.test({
  name: "sh reads a quoted word as it was",
  ignore: Deno.build.os === "windows",
  fn: () => {
    const property = fc.property(words, (list) => {
      assertEquals(readWithSh(list.map(quoteShWord).join(" ")), list);
    });
    fc.assert(property, { numRuns: 60 * THOROUGHNESS });
  },
});

/** What a cron gives to sh, or null when its line ends at a bare `%`. */
const CRONS: Readonly<Record<string, (command: string) => string | null>> = {
  /** Debian, cronie: a backslash is taken away before `%`. */
  plain: (command) => /(^|[^\\])%/.test(command) ? null : command.replaceAll("\\%", "%"),
  /** The first ones also halve a double backslash. */
  halving: (command) => {
    let passed = "";
    for (let index = 0; index < command.length; index++) {
      const [character, next] = [command[index]!, command[index + 1]];
      if (character === "%") return null;
      const isEscape = character === "\\" && (next === "%" || next === "\\");
      passed += isEscape ? next : character;
      if (character === "\\") {
        if (!isEscape && next !== undefined) passed += next;
        index++;
      }
    }
    return passed;
  },
  /** busybox does nothing. */
  busybox: (command) => command,
};

for (const [name, pass] of Object.entries(CRONS)) {
  Deno.test({
    name: `a ${name} cron and sh read a quoted word as it was`,
    ignore: Deno.build.os === "windows",
    fn: () => {
      const tricky = fc.array(
        fc.oneof(
          nastyWord,
          fc.string({ unit: fc.constantFrom("\\", "%", "'", "a"), minLength: 1 }),
        ),
        { minLength: 1, maxLength: 20 },
      );
      const property = fc.property(tricky, (list) => {
        const passed = pass(list.map(quoteCronWord).join(" "));
        assertNotEquals(passed, null);
        assertEquals(readWithSh(passed!), list);
      });
      fc.assert(property, { numRuns: 60 * THOROUGHNESS });
    },
  });
}

Deno.test("a word for cron holds no newline and no double backslash", () => {
  fc.assert(fc.property(nastyWord, (word) => {
    assert(!/\n|\\\\/.test(quoteCronWord(`a\\\\\\b${word}`)));
  }));
});

/** What systemd makes of a quoted argument: unescape, then specifiers, then variables (systemd.service). */
function readAsSystemd(argument: string): string {
  const [, inner] = /^"((?:[^"\\]|\\.)*)"$/su.exec(argument) ?? [];
  assert(inner !== undefined, `not one quoted word: ${argument}`);
  const unescaped = inner.replace(/\\(.)/gsu, (escape, character) => {
    assert(character === "\\" || character === '"', `another escape: ${escape}`);
    return character;
  });
  for (const sign of ["%", "$"]) {
    assert(!unescaped.replaceAll(sign + sign, "").includes(sign), `a bare ${sign} in ${argument}`);
  }
  return unescaped.replaceAll("%%", "%").replaceAll("$$", "$");
}

Deno.test("systemd reads a quoted argument as it was", () => {
  fc.assert(fc.property(nastyPath, (path) => {
    assertEquals(readAsSystemd(quoteSystemdArgument(path)), path);
  }));
});

Deno.test("an XML parser reads an escaped text as it was, in elements and attributes", () => {
  const fail = (_level: string, message: string) => {
    throw new Error(message);
  };
  fc.assert(fc.property(nastyWord, (word) => {
    const xml = `<?xml version="1.0"?><a b="${escapeXml(word)}">${escapeXml(word)}</a>`;
    const root = new DOMParser({ onError: fail }).parseFromString(xml, "text/xml").documentElement!;
    assertEquals([root.getAttribute("b"), root.textContent], [word, word]);
  }));
});

Deno.test("a YAML parser reads a quoted text as it was", () => {
  const yaml = fc.oneof(
    nastyWord,
    fc.string({ unit: "binary" }).filter((text) => text.isWellFormed()),
  );
  fc.assert(fc.property(yaml, (text) => {
    assertEquals(parseYaml(`a:\n  - b: ${quoteYaml(text)}\n`), { a: [{ b: text }] });
    // YAML's printable characters (1.2, section 5.1), less what would end a line.
    assert(/^[\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\u{10000}-\u{10ffff}]*$/u
      .test(quoteYaml(text)));
  }));
});

/** How programs on Windows split a command line: CommandLineToArgvW, after the program's own name. */
function splitWindows(line: string): string[] {
  const args: string[] = [];
  for (let at = 0; at < line.length;) {
    while (line[at] === " " || line[at] === "\t") at++;
    if (at >= line.length) break;
    let [word, isQuoted] = ["", false];
    for (; at < line.length && (isQuoted || (line[at] !== " " && line[at] !== "\t")); at++) {
      let slashes = 0;
      for (; line[at] === "\\"; at++) slashes++;
      if (line[at] === '"') {
        word += "\\".repeat(Math.floor(slashes / 2));
        if (slashes % 2 === 1) word += '"';
        else isQuoted = !isQuoted;
      } else {
        word += "\\".repeat(slashes);
        if (at >= line.length || (!isQuoted && (line[at] === " " || line[at] === "\t"))) break;
        word += line[at];
      }
    }
    args.push(word);
  }
  return args;
}

Deno.test("programs on Windows split a line of quoted arguments into what they were", () => {
  const tricky = fc.oneof(
    nastyWord,
    fc.string({ unit: fc.constantFrom("\\", '"', " ", "a"), minLength: 1 }),
  );
  fc.assert(fc.property(fc.array(tricky, { maxLength: 6 }), (list) => {
    assertEquals(splitWindows(list.map(quoteWindowsArgument).join(" ")), list);
  }));
});

Deno.test("UTF-16 begins with its mark and reads back", () => {
  fc.assert(fc.property(fc.string({ unit: "grapheme" }), (text) => {
    const bytes = encodeUtf16(text);
    assertEquals([bytes[0], bytes[1]], [0xff, 0xfe]);
    assertEquals(new TextDecoder("utf-16le", { fatal: true }).decode(bytes), text);
  }));
});

Deno.test("control characters, and what is no text, are refused", () => {
  for (const value of ["a\nb", "a\0", "\u001b[0m", "a\u007f", "a\ud800", "a\uffff"]) {
    assertThrows(() => checkUnitValue("path", value), Error, "Cannot schedule path");
  }
  assertEquals(checkUnitValue("path", "/é \u{1f680}"), "/é \u{1f680}");
});

Deno.test({
  name: "a PATH keeps its order and loses what no unit can hold",
  ignore: Deno.build.os === "windows",
  fn: () => {
    assertEquals(cleanPath("/b:/a::.:bin:/b:/c\nd:/e f%'"), "/b:/a:/e f%'");
    assertEquals(cleanPath(""), "");
  },
});
