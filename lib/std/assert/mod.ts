/**
 * Stand-in for `@std/assert` 1.0.19: the assertions that the tests use, over `node:assert`.
 *
 * @module
 */

import { AssertionError, deepStrictEqual, notDeepStrictEqual } from "node:assert";

/** What follows the function in assertThrows and assertRejects. */
type ExpectedError = [
  classOrMessage?: (abstract new (...args: never[]) => Error) | string | undefined,
  messageIncludes?: string | undefined,
  message?: string | undefined,
];

/**
 * Requires a value to be truthy.
 *
 * @param expression The value.
 * @param message What to say otherwise.
 */
export function assert(expression: unknown, message = ""): asserts expression {
  if (!expression) fail(message || "Expected a truthy value");
}

/**
 * Requires two values to have the same structure and content.
 *
 * @param actual What was found.
 * @param expected What should have been found.
 * @param message What to say otherwise, before the difference.
 */
export function assertEquals<T>(actual: T, expected: T, message?: string): void {
  try {
    deepStrictEqual(actual, expected);
  } catch (error) {
    throw explain(error, message);
  }
}

/**
 * Requires two values to differ.
 *
 * @param actual What was found.
 * @param expected What should not have been found.
 * @param message What to say otherwise.
 */
export function assertNotEquals<T>(actual: T, expected: T, message?: string): void {
  try {
    notDeepStrictEqual(actual, expected);
  } catch (error) {
    throw explain(error, message);
  }
}

/**
 * Requires a value that is neither null nor undefined.
 *
 * @param actual The value.
 * @param message What to say otherwise.
 */
export function assertExists<T>(actual: T, message?: string): asserts actual is NonNullable<T> {
  if (actual === undefined || actual === null) fail(message ?? `Expected a value, found ${actual}`);
}

/**
 * Requires a text to match a pattern.
 *
 * @param actual The text.
 * @param expected The pattern.
 * @param message What to say otherwise.
 */
export function assertMatch(actual: string, expected: RegExp, message?: string): void {
  if (!expected.test(actual)) fail(message ?? `Expected text to match ${expected}:\n${actual}`);
}

/**
 * Requires a text to hold another.
 *
 * @param actual The text.
 * @param expected What it must hold.
 * @param message What to say otherwise.
 */
export function assertStringIncludes(actual: string, expected: string, message?: string): void {
  if (!actual.includes(expected)) {
    fail(message ?? `Expected text to hold ${JSON.stringify(expected)}:\n${actual}`);
  }
}

/**
 * Requires a function to throw.
 *
 * @param fn The function.
 * @param message What to say otherwise.
 * @returns What was thrown.
 */
export function assertThrows(fn: () => unknown, message?: string): unknown;
/**
 * Requires a function to throw an error of a class.
 *
 * @param fn The function.
 * @param errorClass The class that the error must belong to.
 * @param messageIncludes What its message must hold.
 * @param message What to say otherwise.
 * @returns The error.
 */
export function assertThrows<E extends Error>(
  fn: () => unknown,
  errorClass: abstract new (...args: never[]) => E,
  messageIncludes?: string,
  message?: string,
): E;
export function assertThrows(fn: () => unknown, ...expected: ExpectedError): unknown {
  try {
    fn();
  } catch (error) {
    return checkError(error, expected);
  }
  return fail(messageOf(expected) ?? "Expected function to throw");
}

/**
 * Requires a promise to be rejected.
 *
 * @param fn Makes the promise.
 * @param message What to say otherwise.
 * @returns What it was rejected with.
 */
export function assertRejects(fn: () => PromiseLike<unknown>, message?: string): Promise<unknown>;
/**
 * Requires a promise to be rejected with an error of a class.
 *
 * @param fn Makes the promise.
 * @param errorClass The class that the error must belong to.
 * @param messageIncludes What its message must hold.
 * @param message What to say otherwise.
 * @returns The error.
 */
export function assertRejects<E extends Error>(
  fn: () => PromiseLike<unknown>,
  errorClass: abstract new (...args: never[]) => E,
  messageIncludes?: string,
  message?: string,
): Promise<E>;
export async function assertRejects(
  fn: () => PromiseLike<unknown>,
  ...expected: ExpectedError
): Promise<unknown> {
  let promise: PromiseLike<unknown>;
  try {
    promise = fn();
  } catch (error) {
    return fail(messageOf(expected) ?? `Expected a rejection, but the function threw: ${error}`);
  }
  try {
    await promise;
  } catch (error) {
    return checkError(error, expected);
  }
  return fail(messageOf(expected) ?? "Expected promise to be rejected");
}

/**
 * Fails a test.
 *
 * @param message Why.
 */
export function fail(message = "Failed"): never {
  throw new AssertionError({ message });
}

function checkError(error: unknown, expected: ExpectedError): unknown {
  const [errorClass, messageIncludes = ""] = expected;
  if (errorClass === undefined || typeof errorClass === "string") return error;
  const message = messageOf(expected);
  if (!(error instanceof errorClass)) {
    return fail(message ?? `Expected ${errorClass.name}, found ${error}`);
  }
  if (!error.message.includes(messageIncludes)) {
    const text = JSON.stringify(messageIncludes);
    return fail(message ?? `Expected message to hold ${text}: ${error.message}`);
  }
  return error;
}

function messageOf([classOrMessage, , message]: ExpectedError): string | undefined {
  return typeof classOrMessage === "string" ? classOrMessage : message;
}

function explain(error: unknown, message: string | undefined): unknown {
  if (error instanceof AssertionError && message !== undefined) {
    error.message = `${message}\n${error.message}`;
  }
  return error;
}
