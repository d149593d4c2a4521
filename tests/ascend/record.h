// How the stand-ins write down what reaches them: one line per call, the device first.
#pragma once

#include <sstream>
#include <string>

void append_to_record(const std::string &call);

template <typename... Arguments> void record(const char *name, const Arguments &...arguments) {
    std::ostringstream call;
    call << name;
    ((call << ' ' << arguments), ...);
    append_to_record(call.str());
}
