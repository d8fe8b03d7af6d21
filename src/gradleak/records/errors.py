"""What can be wrong with a record, said so that a person can mend it."""


class RecordError(ValueError):
    """A record that cannot be written, found or read. The message is a whole sentence with the fix."""
