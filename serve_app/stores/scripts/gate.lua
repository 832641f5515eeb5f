-- include caller
-- gate: who is calling, in one round trip and before any body is read. ARGV and answer: see caller.lua
return caller()
