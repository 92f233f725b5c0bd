// The rights of the reader.

/** `scope` of the token: read, run or admin; empty while it is unknown. */
export const session = { scope: "" };

/** Whether to offer pause and stop. With an unknown scope they are offered; the service decides. */
export const mayChange = () => session.scope !== "read";
