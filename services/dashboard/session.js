// What is known of the one who looks.

/** `scope` of the token: read, run or admin; empty while it is not known. */
export const session = { scope: "" };

/** Whether runs may be paused and stopped; tried anyway where the scope is not known. */
export const mayChange = () => session.scope !== "read";
