"""Control of draft sizes: compares the measured survival of draft tokens with measured prices."""
