"""Control of draft sizes, from acceptance rates of draft tokens and the costs of verifying them."""
