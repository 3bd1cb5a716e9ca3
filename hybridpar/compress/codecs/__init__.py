"""The codecs, one per file. Each module here enters its codec into `CODECS`, which imports it when it is asked for."""
