"""The nouns: what crosses between client, attacker and auditor. Imports nothing else of ours."""
