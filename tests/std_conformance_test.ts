/**
 * What the project relies on in the @std packages, asserted against whatever is installed: the packages
 * themselves or the stand-ins of lib/std.
 */

import { assertEquals } from "@std/assert";
import { parse } from "@std/jsonc";
Deno.test("parse() reads JSON with comments", () => assertEquals(parse("[1, /* a */ 2,]"), [1, 2]));
