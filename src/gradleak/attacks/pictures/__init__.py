"""Search for pictures whose gradient looks like the observed one."""
