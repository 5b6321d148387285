// Compiles precompiled.h once; nobody runs it.
int main() { return 0; }
