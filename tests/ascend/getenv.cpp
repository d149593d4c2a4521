// Preloaded: writes down which environment variables C code asks for, and when.
#include <cstdio>
#include <cstring>

extern "C" char **environ;

namespace {

char *look_up(const char *name) {
    const size_t length = std::strlen(name);
    for (char **entry = environ; entry && *entry; entry++)
        if (!std::strncmp(*entry, name, length) && (*entry)[length] == '=')
            return *entry + length + 1;
    return nullptr;
}

}  // namespace

extern "C" char *getenv(const char *name) {
    const char *file = look_up("CANN_STANDIN_VARIABLES");
    if (FILE *record = file ? std::fopen(file, "a") : nullptr) {
        std::fprintf(record, "%s\n", name);
        std::fclose(record);
    }
    return look_up(name);
}
