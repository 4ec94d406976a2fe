"""Google's Gemini API: contents of parts, answers of candidates."""
