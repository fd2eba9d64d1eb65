"""The folders of --save and --load: in a file system, or in an object store."""
