"""The codecs, a family in each file. A module enters its codecs into `CODECS`, which imports it when asked for one."""
