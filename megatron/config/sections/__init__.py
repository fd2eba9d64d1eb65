"""The sections of the configuration: one frozen dataclass per file, whose fields are the flags."""
