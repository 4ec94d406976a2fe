/** The module that the server makes: see api/server/routes/pages.py. */
export const words: Record<"drafters" | "losses" | "parts", Record<string, string>>;
