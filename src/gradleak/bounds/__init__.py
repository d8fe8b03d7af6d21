"""What no attack could do: the other side of the bracket around what attacks did.

Every number says whether it is a theorem or an estimate, and what it rests on: docs/bounds.md.
"""
